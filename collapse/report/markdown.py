"""REPORT.md: the report for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from collapse.plan import Skipped
from collapse.report.data import Applied, GraphFigures, Module, Report
from collapse.report.path import path_table
from collapse.report.speed import sentence
from collapse.report.text import FIGURES, change, exact, short, table
from collapse.search_path import SearchPath

STATUS_WORDS = {
    "verified": "Every check was run and passed.",
    "refuted": "A check failed; nothing was published.",
    "inconclusive": "Some checks could not be run.",
    "not-run": "This is a plan; nothing has been written or verified.",
}
NEAR_MISSES = 20


def to_markdown(report: Report) -> str:
    """Return REPORT.md."""
    parts = [
        f"# {report.source.name} under the schema `{report.input_schema.get('type', 'custom')}`",
        _summary(report),
        summary_table(report),
        *_graph(report.graph),
        sentence(report.decode_speed) if report.decode_speed else "",
        *(f"> **{missed}**" for missed in report.unmet),
        *(f"> {note}" for note in report.notes),
        "## What was collapsed",
        *_rewrites(report.rewrites),
        *_modules(report.modules),
        *_searched(report.search),
        "## Near misses",
        *_skipped(report.skipped),
        "## What was verified",
        *_checks(report),
        "## How to reproduce it",
        _reproduce(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(report: Report) -> str:
    saved = report.before.params - report.after.params
    share = f"{100 * saved / report.before.params:.2f} %" if report.before.params else "0 %"
    what = f"**{exact(saved)} of {exact(report.before.params)} parameters gone ({share}).**" if saved else (
        "**No parameter was removed.**"
    )  # fmt: skip
    return f"{what} {STATUS_WORDS[report.verified.status]}"


def summary_table(report: Report) -> str:
    """Return the table of all figures before and after, and what the FLOPs are of."""
    rows = []
    for name, words in FIGURES.items():
        before, after = getattr(report.before, name), getattr(report.after, name)
        rows.append((words, exact(before), exact(after), change(before, after)))
    work = report.workload
    sizes = report.tensor_parallel
    lines = [
        table(("", "before", "after", "change"), rows),
        f"One sequence, {work.prompt} prompt tokens. A multiply-accumulate is 2 FLOPs; pointwise work is not counted. "
        "*Executed* takes the whole attention square, *causal* its lower triangle; the head is counted once a "
        f"prefill. Decode is a token that attends to {work.prompt}.",
    ]
    if sizes.before or sizes.after:
        both = f"{_sizes(sizes.before)} before, {_sizes(sizes.after)} after"
        lines.append(f"Tensor-parallel sizes that divide heads and vocabulary: {both}.")
    return "\n\n".join(lines)


def _graph(figures: GraphFigures | None) -> Iterator[str]:
    """Say what plain transformers does not save; the table counts none of it."""
    if figures is None:
        return
    before, after = figures.prefill_flops_before, figures.prefill_flops_after
    yield (
        f"As a graph, run by `collapse.load_graph`, a prefill executes {exact(after)} FLOPs beside the "
        f"{exact(before)} of the collapsed checkpoint ({change(before, after)}), in {figures.nodes_after} calls beside "
        f"{figures.nodes_before}, with {exact(figures.table_bytes)} bytes of folded values."
    )


def _sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def summary_lines(rewrites: Iterable[Applied]) -> Iterator[str]:
    """Yield one line for rewrites that say the same, with the site of the first and how many more there are."""
    for (grade, kind, pass_name, claim, _), items in _alike(rewrites).items():
        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        yield f"{grade}: {pass_name} {kind} {items[0].site}{more}: {claim}"


def _alike(rewrites: Iterable[Applied]) -> dict[tuple[str, str, str, str, str], list[Applied]]:
    """Group rewrites that say the same about different sites."""
    groups: dict[tuple[str, str, str, str, str], list[Applied]] = {}
    for item in rewrites:
        key = (item.grade, item.kind, item.pass_name, item.evidence.claim, item.evidence.method)
        groups.setdefault(key, []).append(item)
    return groups


def _rewrites(rewrites: tuple[Applied, ...]) -> Iterator[str]:
    if not rewrites:
        yield "Nothing."
    for (grade, kind, pass_name, claim, method), items in _alike(rewrites).items():
        sites = ", ".join(f"`{item.site}`" for item in items)
        lines = [f"### {kind}: {sites}" if len(items) == 1 else f"### {kind}, {len(items)} sites"]
        if len(items) > 1:
            lines.append(sites)
        lines.append(f"**{grade}** by `{pass_name}`: {_sentence(claim)} {_sentence(method)}")
        lines.extend(_figures(item) for item in items if item.evidence.figures)
        lines.extend(_replaced(item) for item in items if item.replaced)
        yield "\n\n".join(lines)


def _figures(item: Applied) -> str:
    shown = ", ".join(f"{name} {_number(value)}" for name, value in sorted(item.evidence.figures.items()))
    return f"- `{item.site}`: {shown}"


def _replaced(item: Applied) -> str:
    return f"- `{item.site}`: computed data for {', '.join(f'`{name}`' for name in item.replaced)}"


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _modules(modules: tuple[Module, ...]) -> Iterator[str]:
    changed = [item for item in modules if item.state != "kept"]
    if not changed:
        return
    rows = [
        (
            f"`{item.path}`", str(item.count), item.state,
            f"{short(item.before.params)} -> {short(item.after.params)}",
            f"{short(item.before.prefill_flops)} -> {short(item.after.prefill_flops)}",
            f"{short(item.before.decode_flops_per_token)} -> {short(item.after.decode_flops_per_token)}",
        )
        for item in changed
    ]  # fmt: skip
    yield "Modules that changed, each with its children; figures are of one of them."
    yield table(("module", "times", "state", "parameters", "prefill FLOPs", "decode FLOPs"), rows)


def _searched(path: SearchPath | None) -> Iterator[str]:
    if path is not None and path.points:
        yield "## What was searched"
        yield path_table(path)
        yield "What is promised is the evidence above; the plan's digest does not cover this table."


def _skipped(skipped: tuple[Skipped, ...]) -> Iterator[str]:
    if not skipped:
        yield "None: no pass looked at a site and left it."
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for item in skipped:
        groups.setdefault((item.pass_name, item.reason), []).append(item.site)
    lines = []
    for (pass_name, reason), sites in list(groups.items())[:NEAR_MISSES]:
        shown = ", ".join(f"`{site}`" for site in sites[:4]) + (f" and {len(sites) - 4} more" if len(sites) > 4 else "")
        lines.append(f"- `{pass_name}` left {shown}: {reason}")
    if len(groups) > NEAR_MISSES:
        lines.append(f"- and {len(groups) - NEAR_MISSES} more in report.json")
    yield "\n".join(lines)


def _checks(report: Report) -> Iterator[str]:
    yield f"**{report.verified.status}.** {STATUS_WORDS[report.verified.status]}"
    words = {True: "passed", False: "FAILED", None: "not run"}
    if report.verified.checks:
        yield "\n".join(
            f"- {words[check.passed]}: {check.name}. {_sentence(check.detail)}" for check in report.verified.checks
        )


def _reproduce(report: Report) -> str:
    return (
        f"The source has the digest `{report.source.digest}`, the plan `{report.plan_digest}`. The plan is in "
        "`collapse.json`. Applied to the same source it gives the same bytes:\n\n"
        "```\ncollapse export MODEL --plan plan.json -o OUT\ncollapse verify OUT --source MODEL\n```"
    )
