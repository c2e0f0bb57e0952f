# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The rank collapse of vLLM 0.25 and 0.26
#
# In WRITE mode, prefill pushes its KV cache into decode's memory; with equal TP, rank 3 writes to rank 3. In vLLM 0.25 and
# 0.26 **every prefill rank wrote to decode rank 0**. The other decode ranks were told that their blocks were complete, and
# decoded from memory that nobody had written: no error, no hang, wrong answers.
# [PR #47764](https://github.com/vllm-project/vllm/pull/47764) fixed it in 0.27.0.
#
# This notebook follows one request through 0.26.0 and 0.27.0, P TP8 → D TP8, DeepSeek-V3 (61 layers, MLA), and then takes the
# fix apart. It runs kvcover's model: no GPU, no vLLM. A *cell* is one block of one layer at one decode rank, and *coverage* is
# the share of cells that hold what they should when decode starts to use them. With MLA every rank needs the whole latent.

# %%
from pprint import pprint

try:
    import matplotlib.pyplot as plt
except ModuleNotFoundError:
    raise SystemExit("the figures need matplotlib: pip install 'kvcover[notebook]'") from None

from kvcover import Scenario, Side, resolve, run, run_world

BROKEN, FIXED = "0.26.0", "0.27.0"
TP, LAYERS = 8, 61


def scenario(release, prefill=TP, decode=TP, **fields):
    return Scenario(release=release, model="deepseek-v3", prefill=Side(tp=prefill), decode=Side(tp=decode), **fields)


setups = {release: resolve(scenario(release)) for release in (BROKEN, FIXED)}
results, worlds = {}, {}
for release, setup in setups.items():
    results[release], worlds[release] = run_world(setup)

# %% [markdown]
# ## 1. What the router sends
#
# The toy proxy that ships with vLLM puts this `kv_transfer_params` into the prefill leg. It is the same for both releases, and
# decode's TP size is in it, under the name `remote_tp_size`.

# %%
legs = {release: world.legs[0, "prefill"] for release, world in worlds.items()}
pprint(legs[BROKEN], sort_dicts=False)

assert legs[BROKEN] == legs[FIXED]
assert legs[BROKEN]["remote_tp_size"] == TP and "tp_size" not in legs[BROKEN]

# %% [markdown]
# ## 2. What the prefill engine reads
#
# 0.26.0 looks for another name, `tp_size`, and takes 1 when it is not there. So it believes that decode has one rank.

# %%
peer_tp = {}
for release, setup in setups.items():
    prefill = setup.prefill.release
    peer_tp[release] = prefill.call("peer_tp")(legs[release], TP, TP)
    print(f"{release}: policy peer_tp = {prefill.peer_tp}, reads {peer_tp[release]}")

assert peer_tp == {BROKEN: 1, FIXED: 8}

# %% [markdown]
# ## 3. Where that leads: rank map and port
#
# Both releases share the rank map: of `own` prefill ranks, rank `r` goes to decode rank `r // (own // peer)`. With a peer of 1
# that is always 0. The port dialled is decode's handshake port plus the mapped rank. Columns: mapped rank, port dialled, and
# who answered in the run.

# %%
print(f"{'':4}" + "".join(f"{release:34}" for release in setups))
for rank in range(TP):
    line = f"P{rank:<3}"
    for release, setup in setups.items():
        mapped = rank // (TP // peer_tp[release])
        port = setup.decode.handshake_port + mapped
        (dialled,) = [e for e in worlds[release].history.events("dialled") if e.actor == f"P{rank}"]
        line += f"{f'D{mapped}   port {port}   {dialled.peer} answered':34}"
        assert dialled.fields.port == port and dialled.peer == f"D{mapped}"
        assert mapped == (0 if release == BROKEN else rank)
    print(line)

# %% [markdown]
# ## 4. Who is written, and who is told
#
# Data goes where the handshake went. The message "write done" does not: it goes to the decode rank of the sender's own number,
# without the map. So in 0.26.0 all eight decode ranks are told, and only one was written. That is why nothing hung.

# %%
needed = [f"D{rank}" for rank in range(TP)]


def names(ranks):
    return f"all {TP}" if len(ranks) == TP else ", ".join(sorted(ranks)) or "nobody"


print(f"{'':4}" + "".join(f"{release:34}" for release in setups))
for name in needed:
    line = f"{name:4}"
    for world in worlds.values():
        writers = {event.actor for event in world.history.events("wrote") if event.peer == name}
        tellers = {event.peer for event in world.history.events("told") if event.actor == name}
        line += f"{f'written by {names(writers)}, told by {names(tellers)}':34}"
    print(line)

for release, written in ((BROKEN, ["D0"]), (FIXED, needed)):
    assert results[release].sets.needed == results[release].sets.told == needed
    assert results[release].sets.written == written
    assert len(worlds[release].history.events("wrote")) == TP * LAYERS  # the same traffic in both

# %% [markdown]
# ## 5. The missing cells
#
# D0 gets the same latent eight times over and is right; D1 to D7 get nothing. One rank of eight: coverage 1/8.

# %%
grids = {release: world.coverage_by_layer() for release, world in worlds.items()}
assert grids[BROKEN] == [[1.0] * LAYERS] + [[0.0] * LAYERS] * (TP - 1)
assert grids[FIXED] == [[1.0] * LAYERS] * TP
assert results[BROKEN].coverage == 1 / TP and results[BROKEN].outcome == "corrupt"
assert results[FIXED].coverage == 1 and results[FIXED].outcome == "ok"

# %%
figure, panels = plt.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
for panel, (release, grid) in zip(panels, grids.items(), strict=True):
    image = panel.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    panel.set_title(f"vLLM {release}: coverage {results[release].coverage:g}, outcome {results[release].outcome}", loc="left")
    panel.set_ylabel("decode rank")
    panel.set_yticks(range(TP), needed)
    panel.set_yticks([rank + 0.5 for rank in range(TP - 1)], minor=True)
    panel.grid(which="minor", axis="y", color="white", linewidth=2)
    panel.tick_params(which="minor", left=False)
    panel.set_title("layers covered", loc="right", fontsize="medium")
    for rank, row in enumerate(grid):
        panel.text(LAYERS + 5.5, rank, f"{sum(value == 1 for value in row)} of {LAYERS}", ha="right", va="center")
panels[-1].set_xlabel("layer")
panels[-1].set_xticks(range(0, LAYERS, 10))
figure.colorbar(image, ax=panels, label="coverage of one layer at one rank", ticks=[0, 0.5, 1], aspect=40)
if plt.get_backend().lower() == "agg":  # a script, and no window to show it in
    figure.savefig("rank_collapse.png")
    print("the figure is in rank_collapse.png")
else:
    plt.show()

# %% [markdown]
# The model gives the same chain of causes by itself. The last line runs it again from a shell.

# %%
for finding in results[BROKEN].findings:
    print(finding.text)
    for cause in finding.causes:
        print("   ←", cause)
print("\n" + results[BROKEN].replay)

# %% [markdown]
# ## 6. The key dropped, the key renamed
#
# If the name is the cause, then dropping the key changes nothing in 0.25 and 0.26, which never read it, and sending the value
# under the name that they do read heals them. Both hold. 0.24.0 is not affected: it has no rank map, which came with
# [PR #46332](https://github.com/vllm-project/vllm/pull/46332). 0.27.0 takes either name, and a missing size for its own.

# %%
DROP, RENAME = "drop:remote_tp_size@prefill", "rename:remote_tp_size=tp_size@prefill"


def show(title, columns, table):
    """Run every scenario of a table, print it, and insist on each expected (coverage, outcome)."""
    print(f"{title:28}" + "".join(f"{column:20}" for column in columns))
    for label, scenarios, expected in table:
        ran = [run(one) for one in scenarios]
        print(f"{label:28}" + "".join(f"{f'{one.coverage:<6.4g} {one.outcome}':20}" for one in ran))
        assert [(one.coverage, one.outcome) for one in ran] == expected, label


collapsed, healed = (1 / TP, "corrupt"), (1, "ok")
RELEASES = ["0.24.0", "0.25.1", BROKEN, FIXED]
show("P TP8 → D TP8", RELEASES, [
    (label, [scenario(release, faults=faults) for release in RELEASES], expected)
    for label, faults, expected in [
        ("as sent", (), [healed, collapsed, collapsed, healed]),
        ("remote_tp_size dropped", (DROP,), [healed, collapsed, collapsed, healed]),
        ("renamed to tp_size", (RENAME,), [healed, healed, healed, healed]),
    ]
])  # fmt: skip

# %% [markdown]
# ## 7. The three changes of the fix, one by one
#
# 1. **Name** (`peer_tp`): read `remote_tp_size`, else `tp_size`, else 0 for unknown.
# 2. **Map** (`unknown_tp_map`): in the rank map, 0 counts as the own size.
# 3. **Guard** (`unknown_tp_guard`): the same in the check of KV heads. WRITE never hands that check the peer's size, READ does.
#
# Here each is put on top of 0.26.0. The name alone heals what was reported, but it makes a missing key worse than it was: 0 is
# refused, every write task fails, decode waits for ever. The map repairs that. The guard shows only in READ, where a key
# missing from the *decode* leg kills the decode engine until all three changes are in.
#
# READ had the wrong size as well, and still got the right data: all decode ranks read from P0, which with MLA holds all there
# is. P1 to P7 were never released and held their blocks until a timer: `degraded`. (These READ runs use the fabric `loopback`,
# on which bytes land at once, to leave out a race of READ that is another story.)

# %%
NAME = {"peer_tp": "remote_tp_size_or_tp_size_or_0"}
MAP = {"unknown_tp_map": "zero_is_own"}
GUARD = {"unknown_tp_guard": "zero_is_own"}
READ_DROP = {"mode": "read", "fabric": "loopback", "faults": ("drop:remote_tp_size@decode",)}

show("0.26.0 and …", ["WRITE, as sent", "WRITE, key dropped", "READ, key dropped"], [
    (label, [scenario(BROKEN, overrides=changes, **fields) for fields in ({}, {"faults": (DROP,)}, READ_DROP)], expected)
    for label, changes, expected in [
        ("nothing", {}, [collapsed, collapsed, (1, "degraded")]),
        ("map", MAP, [collapsed, collapsed, (1, "degraded")]),
        ("guard", GUARD, [collapsed, collapsed, (1, "degraded")]),
        ("name", NAME, [healed, (0, "hang"), (0, "crash")]),
        ("name, map", NAME | MAP, [healed, healed, (0, "crash")]),
        ("name, guard", NAME | GUARD, [healed, (0, "hang"), (0, "crash")]),
        ("name, map, guard", NAME | MAP | GUARD, [healed, healed, healed]),
    ]
])  # fmt: skip

# %% [markdown]
# A draft of the fix took *0 or less* for unknown; the review settled on *0*. The two differ when a router sends a negative
# size. The draft hides the nonsense and, with one DP rank, gets away with it. The released fix refuses it in every write task,
# where it can be seen; decode, though, is told nothing and hangs.

# %%
DRAFT = {"unknown_tp_map": "non_positive_is_own", "unknown_tp_guard": "non_positive_is_own"}
show("0.27.0, remote_tp_size", ["0 (released)", "0 or less (draft)"], [
    (str(size), [scenario(FIXED, overrides=rule, faults=(f"set:remote_tp_size={size}@prefill",)) for rule in ({}, DRAFT)], expected)
    for size, expected in [(0, [healed, healed]), (-1, [(0, "hang"), healed])]
])  # fmt: skip

# %% [markdown]
# ## 8. What stayed broken
#
# **Unequal TP.** The report of the fix gives good accuracy for P TP4 → D TP8 too. The released 0.27.0 can't do that in WRITE:
# each of the four prefill ranks writes one decode rank, `r × 2`, and tells another, `r`. Four of eight ranks are written, four
# are told, D1 and D3 are told over nothing, and D4 to D7 wait for ever. vLLM's own connector, run in the harness, does the
# same (rows `0.27.0/write/p4d8/mla/toy` and `0.33.0/write/p4d8/mla/toy` of `tests/data/measured.toml`). What the report ran,
# we don't know. In 0.33.0 each prefill rank writes, and tells, every decode rank that needs its data.

# %%
half = (4 / 8, "hang")
show("P TP4 → D TP8", [FIXED, "0.32.0", "0.33.0"], [
    ("as sent", [scenario(release, prefill=4) for release in (FIXED, "0.32.0", "0.33.0")], [half, half, healed]),
])  # fmt: skip

unequal = run(scenario(FIXED, prefill=4))
print("\nwritten", *unequal.sets.written, "\ntold   ", *unequal.sets.told)
assert unequal.sets.written == [f"D{2 * rank}" for rank in range(4)]
assert unequal.sets.told == [f"D{rank}" for rank in range(4)]

# %% [markdown]
# **A missing key with DP.** The map takes an unknown size for the own size, but the port dialled is base + dp × *size as read*
# + tp, and there 0 is still 0. With P DP8 → D DP8 and the key dropped, every handshake, whichever DP rank it is meant for,
# reaches D0.0. (With the draft and −1 it would be base − dp.)

# %%
for release in (FIXED, "0.33.0"):
    dp8 = Scenario(release=release, model="deepseek-v3", prefill=Side(dp=8), decode=Side(dp=8), faults=(DROP,))
    result, world = run_world(resolve(dp8))
    answered = {event.peer for event in world.history.events("dialled")}
    print(f"{release}: {result.outcome}, handshakes reached {', '.join(answered)}")
    assert answered == {"D0.0"} and result.outcome == "corrupt"
