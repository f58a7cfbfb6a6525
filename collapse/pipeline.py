"""The main job, stage by stage. This module alone knows every stage; each stage knows only earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from collapse.analysis.config_cost import cost_of_config
from collapse.analysis.config_values import with_values
from collapse.analysis.flops import Cost, cost
from collapse.analysis.ties import config_as_loaded
from collapse.analysis.token_use import Samples
from collapse.analysis.traffic import element_bytes
from collapse.auto import config_from
from collapse.budget import parse_budget
from collapse.canonical import dumps
from collapse.checkpoint import DTYPE_BITS, Checkpoint
from collapse.corpus import Split, builtin_corpus, read_corpus, related, split
from collapse.erase import write_checkpoint
from collapse.errors import CollapseError, OutputError, PlanError, RefutedError, UnsupportedError
from collapse.free_layout import is_free_config
from collapse.heal.propose import heal_plan
from collapse.manifest import versions, write_manifest
from collapse.memory import release_memory
from collapse.options import DEFAULTS, Options, chosen_passes
from collapse.passes import MOVES, Context, Pass
from collapse.passes.constant_fold import count_nodes
from collapse.plan import Narrow, Plan, Replace, Rewrite, ShortCircuit, Skipped
from collapse.program import Program
from collapse.progress import Stopwatch
from collapse.report.data import GraphFigures, Report, build_report
from collapse.report.graph import report_graph
from collapse.report.markdown import to_markdown
from collapse.report.render import render
from collapse.report.unmet import unmet
from collapse.rewrite.computed import Computed
from collapse.rewrite.config import config_edits
from collapse.rewrite.free import added_names, added_tensors
from collapse.rewrite.graph import rewrite_program, rewrite_weights
from collapse.rewrite.specialise import Specialised, has_graph_edits, specialise
from collapse.rewrite.tensors import output_tensors, token_narrow
from collapse.rewrite.values import Values, require_values, save_plan
from collapse.runtime.confirm import asked_speed, confirm
from collapse.schema import InputSchema, load_schema
from collapse.search_path import PATH_FILE, SearchPath, save_path
from collapse.sequences import sequences
from collapse.signing import sign_manifest
from collapse.source_model import load_source, source_weights
from collapse.sources import resolve
from collapse.staging import check_output, located, staged
from collapse.trace import trace
from collapse.verdict import Verdict
from collapse.verify import Settings, verify, with_blame
from collapse.verify.computed import exact_graph
from collapse.verify.dynamic import Rewritten
from collapse.verify.samples import SAMPLES, inside

HEADS = ("num_attention_heads", "num_key_value_heads")
LOGIT_BYTES = 24 << 20  # of fp32 logits kept of each model for comparison; more would set the peak of memory


@dataclass(frozen=True)
class Result:
    """What a run gave: `output` is None for a dry run."""

    plan: Plan
    report: Report
    output: Path | None


def make_plan(
    model: str | Path, schema: str | Path | dict[str, object] | InputSchema = "log", options: Options = DEFAULTS,
    *, save: Path | None = None, watch: Stopwatch | None = None,
) -> Result:  # fmt: skip
    """Decide what would go, and count what it saves; nothing is written but the plan, if asked.

    With `save` the plan is written there and, where it replaces tensors, their values beside it: `plan.safetensors`
    beside `plan.json`; and where a search went on, its path in `plan.path.json`. Raises `CollapseError` for a model,
    schema or corpus that cannot be used.
    """
    watch = watch or Stopwatch(quiet=True)
    context = prepare(model, load_schema(schema), options, watch)
    with Computed() as computed:
        plan, path = _decided(context, options, watch, computed)
        rewritten = rewrite_program(context.program, plan, context.checkpoint.config)
        before, after = _costs(context, rewritten, plan, watch)
        graph = _graph_figures(context, rewritten, _special(rewritten, plan))
        report = _report(context, plan, before, after, None, graph, path)
        if save is not None:
            save_plan(plan, computed.values, save)
            save_path(path, save)
    return Result(plan, report, None)


def export(
    model: str | Path,
    output: str | Path,
    schema: str | Path | dict[str, object] | InputSchema = "log",
    options: Options = DEFAULTS,
    *,
    plan: Plan | None = None,
    values: Values | None = None,
    force: bool = False,
    watch: Stopwatch | None = None,
) -> Result:
    """Collapse `model` under `schema` into the directory `output`, verify it, and publish it.

    With a reviewed `plan` just that is applied, and its schema counts; where it replaces tensors it needs its
    `values`, as of `load_values`. Nothing is left under the name of `output` unless verification succeeds.

    Raises:
        CollapseError: bad input; nothing is written.
        RefutedError: the collapsed model does not do what the plan claims; the counterexample is saved beside
            `output`.
    """
    watch = watch or Stopwatch(quiet=True)
    if plan and options.heal:
        raise PlanError("a reviewed plan is applied as it is", where="--heal", fix="heal when the plan is made")
    target = Path(output)
    wanted = load_schema(plan.input_schema if plan else schema)
    checkpoint = _open(model, watch)
    if plan:
        _require_source(plan, checkpoint)
    check_output(located(target), force, checkpoint.root)
    context = prepare(checkpoint, wanted, options, watch)
    if plan:
        asked = options.searched.budgets if options.searched else ()  # those that led to the plan, not any of this run
        context = replace(context, budgets=tuple(map(parse_budget, asked)))
        return _apply(context, checked(plan, context, values), values, options.searched, target, options, force, watch)
    with Computed() as computed:
        decided, walked = _decided(context, options, watch, computed)
        return _apply(context, decided, computed.values, walked, target, options, force, watch)


def prepare(model: str | Path | Checkpoint, schema: InputSchema, options: Options, watch: Stopwatch) -> Context:
    """Open the model, read the corpus, trace: everything that passes look at."""
    checkpoint = model if isinstance(model, Checkpoint) else _open(model, watch)
    if is_free_config(checkpoint.config):
        reason = "is in the free layout already, which is not collapsed again"
        raise UnsupportedError(reason, where=checkpoint.label, fix="collapse its source anew")
    config = config_as_loaded(checkpoint)
    with watch.stage("read corpus"):
        parts, sample = _split(schema, options)
        output = _output_texts(schema, options)
        protected = read_corpus(options.protect, InputSchema(type="text")).documents if options.protect else ()
        drawn = sequences(checkpoint, schema, parts, options.seed)
    with watch.stage("trace"):
        program = with_values(trace(config), config)
        _require_reach(program, schema)
        release_memory()
    texts = Samples(parts.calibration, parts.held_out) if parts else Samples()
    return Context(
        checkpoint=checkpoint,
        config=config,
        schema=schema,
        program=program,
        texts=texts,
        related=sample,
        output_texts=output,
        sequences=drawn,
        load_model=lambda: load_source(checkpoint, watch),
        load_contrast=lambda: contrast(checkpoint, options.seed),
        threshold=options.threshold,
        stage=options.stage,
        placeholder=options.placeholder,
        layout=options.layout,
        budgets=options.budgets,
        protected=protected,
        cache=options.cache,
        progress=watch.advance,
    )


def _require_reach(program: Program, schema: InputSchema) -> None:
    """Refuse a schema whose inputs are longer than what was traced."""
    limit, wanted = program.max_tokens, schema.max_tokens
    if limit is not None and (wanted is None or wanted > limit):
        reason = f"rotary frequencies grow beyond {limit} tokens (dynamic NTK), which no traced graph can follow"
        raise UnsupportedError(reason, where="config.json", fix=f"give a schema with max_tokens of at most {limit}")


def _decided(
    context: Context, options: Options, watch: Stopwatch, computed: Computed
) -> tuple[Plan, SearchPath | None]:
    """Return the plan of all passes, healed where that is asked for, and the path of the search that led to it."""
    plan, path = decide(context, chosen_passes(options.passes), watch, computed)
    plan = _healed(context, plan, options, watch, computed)
    return plan, path.of(plan) if path else None


def decide(
    context: Context, passes: Sequence[Pass], watch: Stopwatch, computed: Computed
) -> tuple[Plan, SearchPath | None]:
    """Ask every pass, in order, and put what they propose into a plan; what they compute goes to `computed`.

    Beside the plan is what the search under a budget went through, if there was one.
    """
    rewrites: list[Rewrite] = []
    skipped: list[Skipped] = []
    path: SearchPath | None = None
    for one in passes:
        with watch.stage(f"pass {one.name}"):
            proposal = one.propose(context)
        rewrites.extend(proposal.rewrites)
        skipped.extend(proposal.skipped)
        computed.add(proposal.values)
        path = proposal.path or path
    taken = [rewrite for rewrite in rewrites if not isinstance(rewrite, Replace)]
    gone = {name for rewrite in taken for name in getattr(rewrite, "tensors", ())}
    plan = Plan(
        source=context.checkpoint.digest,
        model_type=context.checkpoint.model_type,
        input_schema=context.schema.to_json(),
        schema_digest=context.schema.digest,
        stage=context.stage,
        layout=context.layout,
        rewrites=tuple(rewrites),
        skipped=tuple(one for one in skipped if one.site not in gone),  # what another pass takes is no near miss
        created_by=versions(),
    )
    return plan, path


def _healed(context: Context, plan: Plan, options: Options, watch: Stopwatch, computed: Computed) -> Plan:
    """Return the plan with healed weights where healing is asked for; what is trained goes to `computed`."""
    if options.heal is None:
        return plan
    with watch.stage("heal"):
        healing = heal_plan(context, plan, computed.values, options.heal)
    computed.add(healing.values)
    return healing.plan


def checked(plan: Plan, context: Context, values: Values | None = None) -> Plan:
    """Return the plan if it was made for this very source and the schema in it; raises `PlanError` otherwise.

    Its tensors, axes, rows and `values` are compared with the files first: the graph takes them as they are.
    """
    if plan.schema_digest != context.schema.digest:
        raise PlanError("the schema in the plan is not the one it was made for", fix="make a new plan for this schema")
    _require_source(plan, context.checkpoint)
    if plan.model_type != context.checkpoint.model_type:
        reason = f"the plan says model_type {plan.model_type!r}, config.json {context.checkpoint.model_type!r}"
        raise PlanError(reason, where=context.checkpoint.label, fix="make a new one with `collapse plan`")
    require_values(output_tensors(context.checkpoint, plan), values)
    return plan


def _require_source(plan: Plan, checkpoint: Checkpoint) -> None:
    if plan.source != checkpoint.digest:
        reason = f"was made for a source with digest {plan.source[:12]}, this one has {checkpoint.digest[:12]}"
        raise PlanError(f"the plan {reason}", where=checkpoint.label, fix="make a new one with `collapse plan`")


def contrast(checkpoint: Checkpoint, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return sequences of prose, which a detector of regular text must tell from the schema's."""
    prose = load_schema("text")
    return sequences(checkpoint, prose, split(builtin_corpus(prose), seed), seed).calibration


def _open(model: str | Path, watch: Stopwatch) -> Checkpoint:
    with watch.stage("open model"):
        return resolve(str(model))


def _split(schema: InputSchema, options: Options) -> tuple[Split | None, tuple[str, ...]]:
    """Return the corpus in two parts, and blocks of the built-in sample where the corpus is the user's own.

    The corpus is None for a schema that is about token ids only. Documents that are in the user's text too are left out
    of the sample, since they may be held out.
    """
    if not options.corpus:
        return (None if schema.tokens is not None else split(builtin_corpus(schema), options.seed)), ()
    corpus = read_corpus(options.corpus, schema, options.text_field)
    return split(corpus, options.seed), related(schema, corpus) if schema.tokens is None else ()


def _output_texts(schema: InputSchema, options: Options) -> Samples:
    if not schema.output.corpus:
        return Samples()
    outputs = InputSchema(type=schema.type)
    parts = split(read_corpus([Path(name) for name in schema.output.corpus], outputs, options.text_field), options.seed)
    return Samples(parts.calibration, parts.held_out)


def _apply(
    context: Context,
    plan: Plan,
    values: Values | None,
    path: SearchPath | None,
    target: Path,
    options: Options,
    force: bool,
    watch: Stopwatch,
) -> Result:
    rewritten = rewrite_program(context.program, plan, context.checkpoint.config)
    before, after = _costs(context, rewritten, plan, watch)
    with staged(target, force, context.checkpoint.root) as staging:
        with watch.stage("write"):
            size = options.max_shard_size
            write_checkpoint(context.checkpoint, plan, staging.folder, values=values, max_shard_size=size)
        with watch.stage("digest"):
            known = write_manifest(staging.folder, context.checkpoint, plan).files
        special = _special(rewritten, plan)
        verdict = _verify(context, plan, values, staging.folder, rewritten, special, options, watch)
        if verdict.status != "verified":
            raise refuted(verdict, target)
        with watch.stage("report"):
            graph = _graph_figures(context, rewritten, special)
            report = _report(context, plan, before, after, verdict, graph, path)
        report = _with_speed(report, context, plan, staging.folder, options, watch)
        with watch.stage("report"):
            report.save(staging.folder / "report.json")
            if path is not None:
                path.save(staging.folder / PATH_FILE)
            (staging.folder / "REPORT.md").write_text(to_markdown(report), encoding="utf-8")
            (staging.folder / "graph.svg").write_bytes(render(report_graph(report)))
            write_manifest(staging.folder, context.checkpoint, plan, known)
            if options.sign:
                sign_manifest(staging.folder, options.sign)
        staging.publish()
    return Result(plan, report, target)


def _report(
    context: Context,
    plan: Plan,
    before: Cost,
    after: Cost,
    verdict: Verdict | None,
    graph: GraphFigures | None,
    path: SearchPath | None,
) -> Report:
    text = context.config.get_text_config()
    heads = [getattr(text, name, None) for name in HEADS]
    narrow = token_narrow(plan)
    rows = len(narrow.kept) if narrow else text.vocab_size
    whole = [head for head in heads if isinstance(head, int)]
    local = [fields.local.get(name) for fields in plan.of_kind(Narrow) for name in HEADS]
    fewer = [head for head in local if isinstance(head, int)]
    report = build_report(
        plan,
        before,
        after,
        verdict,
        name=context.checkpoint.label,
        program=context.program,
        workload=context.schema.workload,
        divided=([*whole, text.vocab_size], [*whole, *fewer, rows]),
    )
    missed = unmet(context.budgets, path, plan.skipped, MOVES)
    return report.model_copy(update={"graph": graph, "search": path, "unmet": missed})


def _with_speed(
    report: Report, context: Context, plan: Plan, folder: Path, options: Options, watch: Stopwatch
) -> Report:
    """Return the report with the measured speed of a decode step, where a budget asks for one."""
    budget = asked_speed(options.budgets)
    if budget is None:
        return report
    sample = next(iter(inside(context.sequences, plan, 1)), [])
    with watch.stage("measure decode"):
        found = confirm(context.checkpoint, folder, plan, sample, budget, (report.before, report.after), watch.clock)
        release_memory()
    if isinstance(found, str):
        note = f"The decode budget was not confirmed by measurement: {found}."
        return report.model_copy(update={"notes": (*report.notes, note)})
    return report.model_copy(update={"decode_speed": found})


def _special(rewritten: Program, plan: Plan) -> Specialised | None:
    """Return the collapsed program after the plan's edits of the graph alone, None where it has none."""
    return specialise(rewritten, plan) if has_graph_edits(plan) else None


def _graph_figures(context: Context, rewritten: Program, special: Specialised | None) -> GraphFigures | None:
    """Count what the graph edits save beyond the collapsed checkpoint, on the collapsed graph."""
    if special is None:
        return None
    prompt = context.schema.workload.prompt
    whole, edited = (cost(program, prompt=prompt, element_bytes=4) for program in (rewritten, special.program))
    return GraphFigures(
        prefill_flops_before=whole.prefill_flops,
        prefill_flops_after=edited.prefill_flops,
        decode_flops_before=whole.decode_flops_per_token,
        decode_flops_after=edited.decode_flops_per_token,
        nodes_before=count_nodes(rewritten),
        nodes_after=count_nodes(special.program),
        table_bytes=special.folded.table_bytes if special.folded else 0,
    )


def _verify(
    context: Context,
    plan: Plan,
    values: Values | None,
    folder: Path,
    rewritten: Program,
    special: Specialised | None,
    options: Options,
    watch: Stopwatch,
) -> Verdict:
    context.release()  # the verifier loads one model at a time

    def origin() -> Rewritten:
        return Rewritten(context.program, source_weights(context.checkpoint, watch))

    def reference() -> Rewritten:
        weights = source_weights(context.checkpoint, watch)
        changed = rewrite_weights(context.program, weights, plan, values=values)
        exact = exact_graph(context.program, weights, plan, context.checkpoint.config)
        return Rewritten(rewritten, changed, special, exact)

    settings = Settings(prompts=options.prompts, new_tokens=options.new_tokens, logit_bytes=LOGIT_BYTES)
    samples = inside(context.sequences, plan, max(SAMPLES, options.prompts))
    with watch.stage("verify"):
        verdict = verify(
            folder, context.checkpoint, samples=samples, program=reference, plan=plan, settings=settings, watch=watch
        )
        return with_blame(verdict, folder, context.checkpoint, samples, origin)


def refuted(verdict: Verdict, target: Path) -> CollapseError:
    """Save the counterexample beside the output that is not published, and return the error to raise."""
    path = target.parent / f"{target.name}.refuted.json"
    path.write_text(dumps(verdict.model_dump(mode="json")), encoding="utf-8")
    first = next((c for c in verdict.checks if not c.passed), None)
    reason = f"verification says {verdict.status}" + (f": {first.name}: {first.detail}" if first else "")
    reason += "".join(f"; {found.site} ({found.pass_name}): {found.reason}" for found in verdict.blamed[:3])
    kind = RefutedError if verdict.status == "refuted" else OutputError
    return kind(reason, where=str(target), fix=f"nothing was published; see {path.name}")


def _costs(context: Context, rewritten: Program, plan: Plan, watch: Stopwatch) -> tuple[Cost, Cost]:
    """Count source and result with the same counter, at the schema's workload.

    The result is counted on the rewritten graph; where the config says that a module is absent, on a trace of that
    config: the architecture may then leave out more than the module, such as what it kept in the cache for it.
    """
    sizes = element_bytes(context.checkpoint, context.program) | added_bytes(plan)
    prompt = context.schema.workload.prompt
    with watch.stage("count FLOPs"):
        before = cost(context.program, prompt=prompt, element_bytes=sizes)
        if not any(cut.config for cut in plan.of_kind(ShortCircuit)):
            return before, cost(rewritten, prompt=prompt, element_bytes=sizes)
    edited = config_edits(context.checkpoint.config, plan)
    config = config_from(edited)
    with watch.stage("trace"):
        return before, cost_of_config(config, prompt=prompt, element_bytes=sizes).cost


def added_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of an element of every tensor that the plan adds, by its name in the rewritten graph."""
    names, tensors = added_names(plan), added_tensors(plan)
    return {names[name]: DTYPE_BITS[tensor.dtype] / 8 for name, tensor in tensors.items()}
