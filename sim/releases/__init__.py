"""What differs between vLLM releases, as data: a record a release, and the policies that its fields name."""
