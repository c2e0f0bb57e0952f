"""A report of results for people: one page that needs no network, a picture, or Markdown for a pull request."""
