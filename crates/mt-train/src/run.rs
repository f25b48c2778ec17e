//! A training run from its configuration to its last checkpoint.

use std::{
    panic::resume_unwind,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use mt_checkpoint::{Checkpoint, CheckpointManager, ManagerOptions, RunLock};
use mt_config::{Config, Request, TrainConfig};
use mt_ir::Memory;
use mt_models::{Model, start_runtime};
use mt_nn::SequenceOrder;
use mt_runtime::{CompileSettings, Executable, Platform, Runtime, target_of};
use mt_shape::Placement;

use crate::{
    TrainError,
    data::{DataRequest, RunData},
    evaluation::Evaluator,
    measured::{BySize, Measured},
    metrics::{ConsoleStyle, MetricLogger, MetricLoggerOptions},
    objective::Objective,
    peak::peak_tflops,
    placement::{DATA_AXIS, warn_of_replicas},
    plan::{Devices, Intended, TrainPlan},
    program::Programs,
    restore::{Restored, check_sources, restore},
    signals::StopSignal,
    state::{StateLayout, TrainState, steps_done},
    train_loop::{Loop, Progress},
    update::UpdateRule,
};

/// What a caller decides about a run besides its configuration.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    pub console: ConsoleStyle,
    /// The clone of this repository, whose files the quick start trains on.
    pub repository: PathBuf,
    /// What to say on standard error once there is nothing wrong with the input, before the run begins.
    pub announcement: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// All steps are done.
    Completed,
    /// They were done before; nothing was.
    AlreadyComplete,
    /// The evaluation loss came down to the target.
    TargetReached { loss: f64, target: f64 },
    /// The data ended first.
    DataEnded,
    /// A signal asked the run to stop.
    Stopped { signal: i32 },
}

/// Loss on held-out text, in nats a token, and bits a byte where the text's size is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationSummary {
    pub loss: f64,
    pub bits_per_byte: Option<f64>,
}

/// What a run did.
#[derive(Clone, Debug)]
pub struct TrainReport {
    pub ending: Ending,
    /// Steps done since the run's beginning.
    pub steps: u64,
    pub run_directory: PathBuf,
    pub first_evaluation: Option<EvaluationSummary>,
    pub last_evaluation: Option<EvaluationSummary>,
    /// Bits a byte of a model that only knows how often each token occurs.
    pub unigram_bits_per_byte: Option<f64>,
    /// The picture of the loss curves.
    pub chart: PathBuf,
}

/// Trains until the steps are done, the data ends or a signal asks to stop. Resumes a run that has checkpoints.
///
/// # Errors
/// The configuration, the data or a checkpoint does not fit; the loss became infinite; the machine failed.
pub fn train(config: &Config, options: &TrainOptions) -> Result<TrainReport, TrainError> {
    // Before the long work of compiling, so that no signal is lost.
    let stop = StopSignal::listen()?;
    let intended = Intended::new(config)?;
    let runtime = start_runtime(&intended.settings.run, &intended.settings.debug)?;
    let plan = TrainPlan::on(intended, &Devices::of(&runtime))?;
    let TrainPlan { settings, model, topology, placement, .. } = &plan;
    let programs = plan.programs();
    let layout = &*programs.layout;
    let length = settings.data.max_target_length;
    // Batches that grow end with those that need the most memory.
    let [full_rows, _] = plan.batch_dims();
    let full_step = programs.train_step(full_rows, length)?;
    let placement_warnings = settings.placement.check_use(placement)?;

    let directory = settings.run.directory();
    let lock = RunLock::acquire(&directory)?;
    let checkpoints = settings.run.checkpoint_directory();
    let mut manager = CheckpointManager::open(
        &checkpoints,
        &lock,
        ManagerOptions {
            max_to_keep: settings.checkpoint.max_num_checkpoints_to_keep,
            asynchronous: settings.checkpoint.async_checkpointing,
            ..ManagerOptions::default()
        },
    )?;
    let newest = manager.latest()?;
    if let Some(newest) = newest {
        check_resumable(config, settings, layout, &runtime, &manager, newest)?;
    }
    let chart = directory.join("metrics").join("loss.svg");
    if newest.is_some_and(|step| step + 1 >= settings.run.steps)
        && let Some(whole) = mt_checkpoint::open_latest(&checkpoints)?
        && let steps = steps_done(&whole.value)?
        && steps >= settings.run.steps
    {
        return Ok(TrainReport {
            ending: Ending::AlreadyComplete,
            steps,
            run_directory: directory,
            first_evaluation: None,
            last_evaluation: None,
            unigram_bits_per_byte: None,
            chart,
        });
    }
    if newest.is_none() {
        check_metrics_file(settings)?;
        check_sources(&**model, layout, &settings.checkpoint, settings.run.steps)?;
    }

    let data = open_data(settings, options, &runtime, &directory, newest.is_some())?;
    for line in &options.announcement {
        eprintln!("{line}");
    }
    let batches = settings.data.batch_schedule(runtime.num_devices())?;
    let compile =
        |program: &mt_ir::Program| runtime.compile(program, &compile_settings(settings, &program.name));
    let traced = Mutex::new(Some(full_step));
    let compile_step = |rows: usize| {
        let known = match rows == full_rows {
            true => traced.lock().unwrap_or_else(PoisonError::into_inner).take(),
            false => None,
        };
        known.map_or_else(|| programs.train_step(rows, length), Ok)?.try_map(|program| {
            let mut own = compile_settings(settings, &program.name);
            if rows != full_rows {
                // The programs of all sizes have one name.
                own.dump_to = own.dump_to.map(|directory| directory.join(format!("rows_{rows}")));
            }
            match &settings.ahead.compiled_trainstep_file {
                Some(file) if rows == full_rows && file.is_file() => {
                    let step = runtime.load_compiled(&program, &own, file)?;
                    eprintln!("the training step is the compiled one in `{}`", file.display());
                    Ok(step)
                }
                _ => Ok(runtime.compile(&program, &own)?),
            }
        })
    };
    let compile_initialize = || -> Result<Executable, TrainError> { Ok(compile(&programs.initialize()?)?) };
    let has_failed = AtomicBool::new(false);
    let initialize_early = || -> Result<Initial, TrainError> {
        let program = compile_initialize()?;
        // Compilers of other devices may measure on them, and want the memory. A state that does not fit is refused
        // below, with the step that takes it.
        if runtime.platform() != Platform::Cpu
            || has_failed.load(Ordering::Relaxed)
            || runtime.check_memory(&[&program], "").is_err()
        {
            return Ok(Initial::Program(program));
        }
        let state = TrainState::initialize(&program, layout)?;
        // What is not written yet would still count as free memory.
        state.wait()?;
        Ok(Initial::State(state))
    };
    let is_fresh = newest.is_none() && settings.checkpoint.load_full_state_path.is_none();
    // Side by side: compilers use one thread most of the time.
    let (largest, initial) = thread::scope(|scope| {
        let initial = is_fresh.then(|| scope.spawn(initialize_early));
        let largest = compile_step(full_rows);
        has_failed.store(largest.is_err(), Ordering::Relaxed);
        (largest, initial.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))))
    });
    let largest: Measured<Executable> = largest?;
    for note in placement.notes() {
        eprintln!("note: {note}");
    }
    for warning in placement_warnings {
        eprintln!("{warning}");
    }
    if settings.placement.shard_optimizer_over_data && layout.num_slots == 0 {
        let optimizer = settings.optimizer.opt_type.name();
        eprintln!("note: `shard_optimizer_over_data` splits no state: `opt_type={optimizer}` keeps none");
    } else if settings.placement.shard_optimizer_over_data && placement.mesh().axis_size(DATA_AXIS) <= Some(1)
    {
        eprintln!(
            "note: `shard_optimizer_over_data` has no effect: the mesh has no two devices along `data`"
        );
    }
    if runtime.platform() == Platform::Cpu {
        for key in settings.model.remat.offloading() {
            eprintln!(
                "note: `{key}` offloads, but the memory of a CPU's devices is the host's: tensors stay where they are"
            );
        }
    }
    let less_memory = |program: &Executable| -> Result<String, TrainError> {
        let needs = plan.needs(Some(program.memory()?.on_device()));
        Ok(format!("what needs less, the best first:\n  {}", plan.remedies(needs, None).join("\n  ")))
    };
    runtime.check_memory(&[&largest.program], &less_memory(&largest.program)?)?;
    if let Some(advice) = plan.less_remat(runtime.memory_need(&largest.program)?) {
        eprintln!("note: {advice}");
    }

    let evaluator = match &data.evaluation {
        Some(set) => {
            let rows = settings.data.eval_global_batch(runtime.num_devices())?;
            let group = settings.placement.for_evaluation();
            let placement = Arc::new(group.placement(topology)?);
            let programs = plan.programs_at(placement);
            let program = programs.evaluation_step(rows, length)?.try_map(|program| compile(&program))?;
            runtime.check_memory(&[&program.program], &less_memory(&program.program)?)?;
            Some(Evaluator::new(program, set.clone(), settings.model.vocab_size, programs.order))
        }
        None => None,
    };
    let Restored { state, first_step, iterator } =
        restore(&runtime, placement, &**model, layout, &settings.checkpoint, &mut manager, newest, || {
            match initial.transpose()? {
                Some(Initial::State(state)) => Ok(state),
                Some(Initial::Program(program)) => TrainState::initialize(&program, layout),
                None => TrainState::initialize(&compile_initialize()?, layout),
            }
        })?;
    warn_of_replicas(&settings.placement, &**model, &state, placement.mesh());
    if settings.debug.debug_sharding {
        plan.print_placements();
    }

    save_config(config, settings)?;
    let logger = MetricLogger::start(MetricLoggerOptions {
        run_name: settings.run.run_name.clone(),
        total_steps: settings.run.steps,
        last_step: first_step.checked_sub(1),
        console: options.console,
        log_period: settings.run.log_period,
        metrics_file: Some(settings.run.metrics_path()),
        tensorboard_directory: settings.run.enable_tensorboard.then(|| settings.run.tensorboard_directory()),
        chart_file: Some(chart.clone()),
    })?;
    let progress = thread::scope(|scope| {
        Loop {
            settings,
            runtime: &runtime,
            model: &**model,
            layout,
            steps: BySize::new(&compile_step, scope, [(full_rows, largest)]),
            batches,
            evaluator,
            manager,
            logger,
            length,
            order: programs.order,
            first_step,
            stop,
            peak_tflops: peak_tflops(&runtime, settings.model.dtype),
        }
        .run(state, data.train, iterator)
    })?;
    let Progress { ending, steps, first_evaluation, last_evaluation } = progress;
    let unigram_bits_per_byte = if config.is_quick_start() && ending == Ending::Completed {
        data.baseline.bits_per_byte()?
    } else {
        None
    };
    drop(lock);
    Ok(TrainReport {
        ending,
        steps,
        run_directory: directory,
        first_evaluation,
        last_evaluation,
        unigram_bits_per_byte,
        chart,
    })
}

/// What a fresh run begins with.
enum Initial {
    Program(Executable),
    State(TrainState),
}

fn open_data(
    settings: &TrainConfig,
    options: &TrainOptions,
    runtime: &Runtime,
    directory: &Path,
    resumes: bool,
) -> Result<RunData, TrainError> {
    DataRequest {
        data: &settings.data,
        tokenizer: &settings.tokenizer,
        run_directory: directory,
        repository: &options.repository,
        rows: settings.data.batch_schedule(runtime.num_devices())?.full_rows(),
        evaluation_rows: settings.data.eval_global_batch(runtime.num_devices())?,
        evaluation_steps: settings.run.eval_steps,
        evaluates: settings.run.eval_interval.is_some(),
        inherited_tokenizer: settings.inherited_tokenizer(),
        resumes,
    }
    .open()
}

/// The state of a run and how its steps change it, which are the same on every mesh.
#[derive(Clone)]
pub(crate) struct StateRule {
    pub layout: Arc<StateLayout>,
    pub update: Arc<UpdateRule>,
}

impl StateRule {
    /// # Errors
    /// A mask does not fit the model's parameters, or its queries and keys cannot be clipped.
    pub fn new(settings: &TrainConfig, model: &dyn Model, platform: Platform) -> Result<Self, TrainError> {
        let update = UpdateRule::new(&settings.optimizer, model)?;
        let remat = &settings.model.remat;
        let parameters_in = memory(remat.parameter_memory_host_offload, platform);
        let slots_in = memory(remat.optimizer_memory_host_offload, platform);
        let other = model.otherwise_scanned().and_then(|other| {
            let rule = update.of_other(&settings.optimizer, model, &*other)?;
            Some(StateLayout::new(&*other, &rule))
        });
        let layout = StateLayout::new(model, &update).kept_in(parameters_in, slots_in).or_held_as(other);
        let layout = match settings.placement.shard_optimizer_over_data {
            true => layout.with_slots_over(DATA_AXIS),
            false => layout,
        };
        Ok(Self { layout: Arc::new(layout), update: Arc::new(update) })
    }
}

/// Where is what may be offloaded. To a CPU both memories are one.
fn memory(is_offloaded: bool, platform: Platform) -> Memory {
    if is_offloaded && platform != Platform::Cpu { Memory::Host } else { Memory::Device }
}

/// What the programs of a run are made from.
pub(crate) fn programs_of<'a>(
    settings: &TrainConfig,
    model: &'a dyn Model,
    placement: Arc<Placement>,
    platform: Platform,
    state_rule: StateRule,
) -> Programs<'a> {
    let parameters_in = memory(settings.model.remat.parameter_memory_host_offload, platform);
    let order = match settings.context.paired_parts(&placement) {
        Some(parts) => SequenceOrder::Paired { parts },
        None => SequenceOrder::AsRead,
    };
    let objective = objective(settings, model, parameters_in, placement.mesh().num_devices() > 1);
    let StateRule { layout, update } = state_rule;
    let target = target_of(platform, settings.run.cpu_kernels);
    let seed = settings.model.init_weights_seed;
    Programs { model, placement, target, layout, update, objective, seed, order }
}

fn objective<'a>(
    settings: &TrainConfig,
    model: &'a dyn Model,
    layers_in: Memory,
    is_split: bool,
) -> Objective<'a> {
    let group = &settings.objective;
    Objective {
        model,
        gradient_dtype: settings.optimizer.grad_dtype,
        z_loss_multiplier: group.z_loss_multiplier,
        num_vocab_tiling: group.num_vocab_tiling,
        gather_head_once: group.vocab_tiling_ag_once,
        accumulation_steps: settings.objective.gradient_accumulation_steps,
        batch_axes: batch_axes(settings),
        layers_in,
        with_scores: settings.optimizer.use_qk_clip,
        is_split,
    }
}

pub(crate) fn batch_axes(settings: &TrainConfig) -> [String; 2] {
    let names = &settings.placement.input_data_sharding_logical_axes;
    names.clone().try_into().expect("the configuration was checked to have two names")
}

pub(crate) fn compile_settings(settings: &TrainConfig, program: &str) -> CompileSettings {
    let debug = &settings.debug;
    // MaxText's name for the step is that of the jitted function.
    let wanted = debug.dump_hlo_local_module_name.trim_start_matches("jit_");
    let is_dumped = debug.dump_hlo && (wanted.is_empty() || wanted == program);
    CompileSettings {
        dump_to: is_dumped.then(|| debug.dump_hlo_local_dir.clone()),
        xla_flags: debug.compiler_options(),
    }
}

/// Refuses to go on with a run under a configuration that would make it another run.
fn check_resumable(
    config: &Config,
    settings: &TrainConfig,
    layout: &StateLayout,
    runtime: &Runtime,
    manager: &CheckpointManager,
    newest: u64,
) -> Result<(), TrainError> {
    let name = &settings.run.run_name;
    let path = settings.run.config_path();
    if !path.is_file() {
        return Err(TrainError::ResumeConflict(format!(
            "run `{name}` has checkpoints, but not the configuration they were made with, `{}`\n\
             hint: choose another `run_name`, and begin with these checkpoints by `load_full_state_path`",
            path.display()
        )));
    }
    if !settings.checkpoint.enable_checkpointing {
        return Err(TrainError::ResumeConflict(format!(
            "run `{name}` has checkpoints, but `enable_checkpointing` is `false`\n\
             hint: leave it out to resume the run, or choose another `run_name` to start a new one"
        )));
    }
    let saved = Config::resolve(&Request::default().over_saved(path))?;
    // Damage to the newest step is dealt with when it is loaded.
    let saved_devices = Checkpoint::open(manager.directory(), newest)
        .ok()
        .and_then(|checkpoint| checkpoint.custom_metadata().get("num_devices")?.as_u64())
        .map_or(runtime.num_devices(), |devices| devices as usize);
    let conflicts = config.resume_conflicts(runtime.num_devices(), &saved, saved_devices);
    let mut lines: Vec<String> = conflicts
        .iter()
        .map(|conflict| {
            format!("`{}` was `{}` and is now `{}`", conflict.key.name, conflict.left, conflict.right)
        })
        .collect();
    let [before, now] = [&saved, config].map(|config| config.entry("scan_layers").shown());
    if before != now && !layout.may_be_otherwise_scanned() {
        lines.push(format!(
            "`scan_layers` was `{before}` and is now `{now}`, and the names of layers' parameters with it: the patterns of \
             `trainable_parameters_mask` and `adamw_mask` fit others"
        ));
    }
    if lines.is_empty() {
        return Ok(());
    }
    lines.insert(0, format!("run `{name}` has checkpoints made with another configuration"));
    lines.push(
        "hint: repeat the run's values to resume it, or choose another `run_name` to start a new run"
            .to_owned(),
    );
    Err(TrainError::ResumeConflict(lines.join("\n")))
}

/// Refuses to empty a file of metrics that is not the run's own.
fn check_metrics_file(settings: &TrainConfig) -> Result<(), TrainError> {
    let path = settings.run.metrics_path();
    let is_empty = std::fs::metadata(&path).map_or(true, |file| file.len() == 0);
    if is_empty || path.starts_with(settings.run.directory()) {
        return Ok(());
    }
    Err(TrainError::ResumeConflict(format!(
        "`metrics_file` is `{}`, which has lines already, and this run is new\n\
         hint: name another file, or remove this one",
        path.display()
    )))
}

/// Writes the configuration beside the run's other files, in one step that survives a loss of power.
fn save_config(config: &Config, settings: &TrainConfig) -> Result<(), TrainError> {
    use std::{fs::File, io::Write as _};
    let path = settings.run.config_path();
    let partial = path.with_extension("yml.partial");
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(config.to_yaml().as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&partial, &path)?;
        File::open(settings.run.directory())?.sync_all()
    };
    write().map_err(TrainError::io("write", &path))
}
