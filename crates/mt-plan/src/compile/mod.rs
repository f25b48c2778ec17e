//! Compiles a run's programs for absent hardware or this machine's devices, and reports their properties.

mod cycles;
mod gpu;
pub(crate) mod hardware;
mod report;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mt_config::{AbsentHardware, AheadGroup, Chip, DebugGroup, DecodeConfig, RunGroup, TrainConfig};
use mt_engine::DecodePlan;
use mt_ir::Program;
use mt_runtime::{
    CompileSettings, Installation, MemoryUse, OutOfMemory, Platform, RuntimeError, largest_arrays,
};
use mt_shape::{Placement, Topology};
use mt_train::{Devices, TrainPlan};

pub use self::{
    cycles::{CostlyOperation, Cycles, CyclesError, LeftOut, Part, PartCycles},
    hardware::Target,
    report::{Array, Exchanged, Fit, Flops, Lack, Memory, ProgramReport, Report, Times},
};
use crate::{
    PlanError,
    cost::{Exchange, ExchangeKind, ModelFlops, Roofline, Work},
};

/// The programs to compile.
pub enum Subject {
    /// The training step.
    Training(Box<TrainConfig>),
    /// The two programs of generation: prefill and one step.
    Decoding(Box<DecodeConfig>, AheadGroup),
}

/// The optional contents of a report.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    /// Placement tables, which `progress` receives.
    pub placement: bool,
    /// The time by the compiler's final schedule.
    pub cycles: Option<ScheduleDumps>,
}

/// Where a TPU's compiler dumps what the time by its schedule is read from.
#[derive(Clone, Debug)]
pub struct ScheduleDumps {
    /// The directory for schedules, set before the compiler was loaded (`mt_pjrt::dump_schedules`).
    pub schedules: PathBuf,
    /// A directory for the texts of modules, if the run does not dump them.
    pub modules: PathBuf,
}

/// A report of progress during compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The start of a phase.
    Phase(String),
    /// Placement tables.
    Placements(String),
}

/// Compiles the programs of a configuration. `progress` receives the phases, and the placement tables if requested.
///
/// If a program does not fit into the memory of a device, the report says so; this is not an error.
///
/// # Errors
/// The configuration is wrong or does not fit the hardware, or the compiler fails.
pub fn compile(
    subject: Subject,
    extras: &Extras,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, PlanError> {
    match subject {
        Subject::Training(settings) => training(&settings, extras, progress),
        Subject::Decoding(settings, ahead) => decoding(&settings, &ahead, extras, progress),
    }
}

fn training(
    settings: &TrainConfig,
    extras: &Extras,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, PlanError> {
    let (file, hardware) = (&settings.ahead.compiled_trainstep_file, settings.ahead.hardware()?);
    let plan_on = |devices: &Devices| TrainPlan::new(settings.clone(), devices).map_err(PlanError::from);
    let (target, plan) = planned(hardware, &settings.run, &settings.debug, extras, &plan_on, progress)?;
    let start = Instant::now();
    let program = plan.train_step()?;
    let made = start.elapsed();
    if extras.placement || plan.settings().debug.debug_sharding {
        progress(Progress::Placements(plan.placements()));
    }
    let [rows, length] = plan.batch_dims();
    let model = ModelFlops::new(&plan);
    let formula = Formula { flops: model.step, six_n_d: Some(model.six_n_d), tokens: model.tokens };
    let settings = plan.compile_settings();
    let cycles = extras.cycles.as_ref();
    let given = Given { program: &program, made, settings, formula, topology: plan.topology(), cycles };
    let arguments = plan.argument_bytes();
    let mut report = program_report(&target, &given, file.as_deref(), progress)?;
    report.predicted_arguments = Some(arguments);
    if let Fit::TooLarge(lack) = &mut report.fit {
        lack.remedies = plan.remedies(plan.needs(lack.needed), lack.available);
    }
    Ok(Report {
        programs: vec![report],
        sequences: rows,
        length,
        ..describe(&target, plan.placement(), plan.topology())
    })
}

fn decoding(
    settings: &DecodeConfig,
    ahead: &AheadGroup,
    extras: &Extras,
    progress: &mut dyn FnMut(Progress),
) -> Result<Report, PlanError> {
    if ahead.compiled_trainstep_file.is_some() {
        return Err(PlanError::NoTrainingStep);
    }
    let hardware = ahead.hardware()?;
    let plan_on = |devices: &Devices| {
        let attributes = &devices.attributes;
        DecodePlan::new(settings.clone(), devices.platform, devices.number, attributes)
            .map_err(PlanError::from)
    };
    let (target, plan) = planned(hardware, &settings.run, &settings.debug, extras, &plan_on, progress)?;
    let mut programs = Vec::new();
    let rows = plan.rows();
    let flops = plan.model().flops();
    // Prefill computes no logits.
    let filling = flops.weights_per_token - flops.head_weights;
    let made: [(fn(&DecodePlan) -> _, _, _); 2] = [
        (DecodePlan::prefill, plan.rows_of_prefill() * plan.prompt_length(), filling),
        (DecodePlan::step, rows, flops.weights_per_token),
    ];
    for (program, tokens, weights) in made {
        let start = Instant::now();
        let program = program(&plan)?;
        let made = start.elapsed();
        let flops = 2.0 * weights as f64 * tokens as f64;
        let formula = Formula { flops, six_n_d: None, tokens };
        let settings = plan.compile_settings();
        let cycles = extras.cycles.as_ref();
        let given = Given { program: &program, made, settings, formula, topology: plan.topology(), cycles };
        let mut report = program_report(&target, &given, None, progress)?;
        if let Fit::TooLarge(lack) = &mut report.fit {
            lack.remedies = vec![
                "more devices along `ici_tensor_parallelism` or `ici_autoregressive_parallelism`".to_owned(),
                "a shorter `max_target_length`, which is the length of the cache".to_owned(),
                "`weight_dtype=bfloat16`, if it differs".to_owned(),
            ];
        }
        programs.push(report);
    }
    Ok(Report {
        programs,
        sequences: rows,
        length: plan.prompt_length(),
        ..describe(&target, plan.placement(), plan.topology())
    })
}

/// The target and the plan of a run on it. A run that does not fit absent hardware is reported before the plugin is
/// located, since that may take a download.
fn planned<P>(
    hardware: Option<AbsentHardware>,
    run: &RunGroup,
    debug: &DebugGroup,
    extras: &Extras,
    plan_on: &dyn Fn(&Devices) -> Result<P, PlanError>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Target, P), PlanError> {
    let known = hardware.as_ref().map(hardware::devices);
    let check = |devices: &Devices, name: &dyn Fn() -> String| match &extras.cycles {
        Some(_) if devices.platform != Platform::Tpu => Err(PlanError::NoSchedule { hardware: name() }),
        _ => Ok(()),
    };
    if let Some((devices, hardware)) = known.as_ref().zip(hardware.as_ref()) {
        check(devices, &|| format!("`{}`", hardware.slice.name))?;
    }
    let plan = known.as_ref().map(plan_on).transpose()?;
    progress(Progress::Phase("finding the compiler".to_owned()));
    let mut on_install = |installation: &Installation| progress(Progress::Phase(installation.to_string()));
    let target = Target::new(hardware, run, debug, &mut on_install)?;
    let devices = target.devices();
    check(&devices, &|| target.name())?;
    // The plugin may list the devices of several slices in another order.
    match plan {
        Some(plan) if known.as_ref() == Some(&devices) => Ok((target, plan)),
        _ => Ok((target, plan_on(&devices)?)),
    }
}

/// A report without programs.
fn describe(target: &Target, placement: &Placement, topology: &Topology) -> Report {
    let mesh = placement.mesh().split_axes().cloned().collect();
    Report {
        hardware: target.name(),
        device_kind: target.device_kind(),
        chip: target.chip().map(|chip| chip.generation),
        num_devices: target.devices().number,
        num_slices: topology.num_slices(),
        device_memory: target.memory_limit(),
        mesh,
        sequences: 0,
        length: 0,
        programs: Vec::new(),
        host_memory: host_memory(),
    }
}

/// The FLOPs of a program by the model's formula.
struct Formula {
    flops: f64,
    six_n_d: Option<f64>,
    tokens: usize,
}

/// A program to compile.
struct Given<'a> {
    program: &'a Program,
    /// The time that tracing it took.
    made: Duration,
    settings: CompileSettings,
    formula: Formula,
    topology: &'a Topology,
    cycles: Option<&'a ScheduleDumps>,
}

fn program_report(
    target: &Target,
    given: &Given<'_>,
    file: Option<&Path>,
    progress: &mut dyn FnMut(Progress),
) -> Result<ProgramReport, PlanError> {
    let Given { program, made, formula, topology, .. } = given;
    let settings = &dumping(given);
    let num_devices = program.mesh.num_devices();
    progress(Progress::Phase(format!("compiling `{}` for {num_devices} devices", program.name)));
    let counts = &program.counts;
    let mut report = ProgramReport {
        name: program.name.clone(),
        trace_seconds: made.as_secs_f64(),
        compile_seconds: 0.0,
        text_bytes: program.text.len(),
        predicted_arguments: None,
        fit: Fit::Unknown,
        flops: Flops {
            products: counts.all_products(),
            products_by_type: counts
                .products
                .iter()
                .map(|(dtype, flops)| (dtype.to_string(), *flops))
                .collect(),
            others: counts.others,
            is_at_least: counts.is_at_least,
            model: formula.flops,
            six_n_d: formula.six_n_d,
        },
        tokens: formula.tokens,
        memory_traffic: None,
        intensity: None,
        exchanges: Vec::new(),
        times: None,
        cycles: None,
        notes: program.notes.clone(),
        written: dumped(given),
    };
    let start = Instant::now();
    let compiled = match target.compile(program, settings) {
        Ok(compiled) => compiled,
        Err(RuntimeError::OutOfMemory { lack, .. }) => {
            report.compile_seconds = start.elapsed().as_secs_f64();
            report.fit = Fit::TooLarge(self::lack(program, &lack));
            return Ok(report);
        }
        Err(error) => return Err(error.into()),
    };
    report.compile_seconds = compiled.elapsed.as_secs_f64();
    let memory = compiled.memory()?;
    report.fit = fit(target, program, &memory);
    let activity = compiled.activity()?;
    let slices_of = |places: &[usize]| {
        let devices: Vec<usize> = places.iter().map(|place| program.mesh.device(*place)).collect();
        topology.num_slices_of(&devices).max(1)
    };
    report.exchanges = report::exchanged(&activity.collectives, &slices_of);
    report.memory_traffic = Some(activity.memory_bytes);
    if activity.memory_bytes > 0.0 {
        report.intensity = Some(counts.all_products() / num_devices as f64 / activity.memory_bytes);
    }
    if let Some(chip) = target.chip() {
        let exchanges = activity.collectives.iter().filter_map(|collective| {
            Some(Exchange {
                kind: ExchangeKind::named(&collective.kind)?,
                bytes: collective.bytes as f64,
                times: collective.times as f64,
                group: collective.places.len(),
                slices: slices_of(&collective.places),
            })
        });
        let products: BTreeMap<_, _> =
            counts.products.iter().map(|(dtype, flops)| (*dtype, flops / num_devices as f64)).collect();
        let work = Work { products, memory_bytes: activity.memory_bytes, exchanges: exchanges.collect() };
        report.times = times(chip, &work, formula, num_devices);
    }
    report.cycles = cycles(target, given, settings)?;
    if let Some(file) = file {
        compiled.save(program, settings, file)?;
        report.written.push(file.to_owned());
    }
    Ok(report)
}

/// The files to which the run dumps a program.
fn dumped(given: &Given<'_>) -> Vec<PathBuf> {
    let name = &given.program.name;
    let files = ["stablehlo.mlir", "optimized.hlo"];
    given.settings.dump_of(name).map_or_else(Vec::new, |directory| {
        files.iter().map(|file| directory.join(format!("{name}.{file}"))).collect()
    })
}

/// The settings of a program, with a dump of its module if its time by the schedule needs one.
fn dumping(given: &Given<'_>) -> CompileSettings {
    let settings = given.settings.clone();
    match given.cycles {
        Some(dumps) if settings.dump_of(&given.program.name).is_none() => {
            CompileSettings { dump_to: Some(dumps.modules.clone()), dumped: String::new(), ..settings }
        }
        _ => settings,
    }
}

/// The time of a compiled program by its schedule, if requested. The schedules are then deleted, because those of a
/// later program have the same names.
fn cycles(
    target: &Target,
    given: &Given<'_>,
    settings: &CompileSettings,
) -> Result<Option<Cycles>, PlanError> {
    let Some(dumps) = given.cycles else { return Ok(None) };
    let name = &given.program.name;
    let num_devices = given.program.mesh.num_devices();
    let chip = target.chip();
    let core = chip.and_then(|chip| cycles::Core::new(chip, &target.sides(), num_devices));
    let (Some(chip), Some(core)) = (chip, core) else {
        return Err(PlanError::NoSchedule { hardware: target.device_kind() });
    };
    let modules = settings.module_dump_of(name).unwrap_or_else(|| dumps.modules.clone());
    let read = cycles::Dumps { modules: &modules, schedules: &dumps.schedules };
    let flops = given.formula.flops / num_devices as f64;
    let cycles = read.time(core, flops, chip.peak_tflops * 1e12)?;
    read.delete_schedules()?;
    Ok(Some(cycles))
}

fn times(chip: &Chip, work: &Work, formula: &Formula, num_devices: usize) -> Option<Times> {
    let roofline = Roofline::new(chip, work);
    let (overlapped, serial) = (roofline.overlapped()?, roofline.serial()?);
    let utilization = |seconds: f64| formula.flops / (seconds * num_devices as f64 * chip.peak_tflops * 1e12);
    Some(Times {
        products: roofline.compute?,
        memory: roofline.memory,
        links: roofline.links,
        slices: roofline.slices?,
        overlapped,
        serial,
        bound: roofline.bound()?.name(),
        utilization: utilization(overlapped),
        serial_utilization: utilization(serial),
        tokens_per_second_per_device: formula.tokens as f64 / overlapped / num_devices as f64,
        tflops_per_second_per_device: formula.flops / overlapped / num_devices as f64 / 1e12,
    })
}

/// Whether a compiled program fits. Compilers for GPUs do not check the memory themselves.
fn fit(target: &Target, program: &Program, memory: &MemoryUse) -> Fit {
    let memory = Memory::from(*memory);
    match target.memory_limit() {
        Some(available) if memory.needed > available => Fit::TooLarge(Lack {
            needed: Some(memory.needed),
            available: Some(available),
            compiled: Some(memory),
            message: None,
            largest: largest(program),
            remedies: Vec::new(),
        }),
        available => Fit::Fits { memory, share: available.map(|bytes| memory.needed as f64 / bytes as f64) },
    }
}

fn lack(program: &Program, said: &OutOfMemory) -> Lack {
    Lack {
        needed: said.needed,
        available: said.available,
        compiled: None,
        message: Some(said.message.clone()),
        largest: largest(program),
        remedies: Vec::new(),
    }
}

fn largest(program: &Program) -> Vec<Array> {
    let arrays =
        largest_arrays(&program.inputs, &program.outputs, &program.temporaries, program.mesh.num_devices());
    arrays
        .into_iter()
        .map(|array| Array {
            name: array.name,
            ty: array.ty.to_string(),
            bytes: array.bytes,
            is_temporary: array.is_temporary,
        })
        .collect()
}

/// The peak memory of this process, if the system reports it.
fn host_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}
