//! `maxtext compile`.

use std::{
    env, fs,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    process::{self, ExitCode},
    sync::mpsc::{self, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mt_config::{AheadGroup, Config, DecodeConfig, TrainConfig};
use mt_pjrt::{ScheduleDumpError, dump_schedules};
use mt_plan::compile::{Extras, Progress as CompileProgress, ScheduleDumps, Subject, compile};

use crate::{
    arguments::{Compile, CompiledProgram},
    commands::resolve_without_data,
    failure::{Failure, print},
};

/// Runs `maxtext compile`. If the program does not fit into memory, the report says so and the exit status is 1.
pub fn run(mut command: Compile) -> Result<ExitCode, Failure> {
    command.cycles |= command.settings.take_flag("--cycles");
    // libtpu reads its arguments when it is loaded, and they are set before any thread starts.
    let scratch = command.cycles.then(Scratch::prepare).transpose()?;
    let (_, subject) = configure(&mut command)?;
    let progress = Progress::start();
    let extras = Extras { placement: command.placement, cycles: scratch.as_ref().map(Scratch::dumps) };
    let report = compile(subject, &extras, &mut |told| match told {
        CompileProgress::Phase(phase) => progress.begin(phase),
        CompileProgress::Placements(tables) => say!("{tables}"),
    });
    progress.end();
    let report = report?;
    if command.json {
        let json = serde_json::to_string_pretty(&report);
        print(&json.map_err(|error| Failure::run(error.to_string()))?)?;
    } else {
        print(report.to_string().trim_end())?;
    }
    Ok(if report.fits() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// A directory for what a TPU's compiler dumps, which is deleted in the end.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Chooses the directory and has the compiler dump its schedules there.
    fn prepare() -> Result<Self, Failure> {
        let scratch = Self { path: env::temp_dir().join(format!("maxtext-cycles-{}", process::id())) };
        let told = dump_schedules(&scratch.dumps().schedules);
        let hint = |error: &ScheduleDumpError| match error {
            ScheduleDumpError::Taken { .. } => {
                "\nhint: remove it from `LIBTPU_INIT_ARGS`, or leave out `--cycles`"
            }
            ScheduleDumpError::Space(_) => "\nhint: set `TMPDIR` to a directory whose path has no spaces",
            ScheduleDumpError::Threads => "",
        };
        told.map_err(|error| Failure::user(format!("`--cycles`: {error}{}", hint(&error))))?;
        Ok(scratch)
    }

    fn dumps(&self) -> ScheduleDumps {
        ScheduleDumps { schedules: self.path.join("schedules"), modules: self.path.join("modules") }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Without a dump there is no directory.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Reads the arguments, including options that follow keys. Returns the configuration, and what to compile.
pub fn configure(command: &mut Compile) -> Result<(Config, Subject), Failure> {
    command.json |= command.settings.take_flag("--json");
    command.placement |= command.settings.take_flag("--placement");
    command.cycles |= command.settings.take_flag("--cycles");
    if let Some(given) = command.settings.take_option("--program", "NAME")? {
        command.program = CompiledProgram::named(&given).ok_or_else(|| {
            Failure::user(format!("there is no program `{given}`\nhint: one of `train`, `decode`"))
        })?;
    }
    let config = resolve_without_data(command.settings.settings.clone())?;
    let subject = match command.program {
        CompiledProgram::Train => Subject::Training(Box::new(TrainConfig::from_config(&config)?)),
        CompiledProgram::Decode => Subject::Decoding(
            Box::new(DecodeConfig::from_config(&config)?),
            AheadGroup::from_config(&config)?,
        ),
    };
    Ok((config, subject))
}

/// Shows the current phase and its duration on standard error, since compilation takes minutes.
struct Progress {
    phases: Sender<String>,
    writer: JoinHandle<()>,
}

/// The interval between updates of the line on a terminal, and between lines elsewhere.
const TICKS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

impl Progress {
    fn start() -> Self {
        let (phases, received) = mpsc::channel::<String>();
        let writer = thread::spawn(move || {
            let is_terminal = io::stderr().is_terminal();
            let tick = TICKS[usize::from(!is_terminal)];
            let mut current: Option<(String, Instant)> = None;
            let say = |text: &str, ends: bool| {
                // If standard error is closed, output is dropped.
                let _ = match (is_terminal, ends) {
                    (true, false) => write!(io::stderr(), "\r\x1b[K{text}"),
                    (true, true) => write!(io::stderr(), "\r\x1b[K"),
                    (false, _) => writeln!(io::stderr(), "{text}"),
                };
            };
            loop {
                match received.recv_timeout(tick) {
                    Ok(phase) => {
                        say(&phase, false);
                        current = Some((phase, Instant::now()));
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        if let Some((phase, start)) = &current {
                            say(&format!("{phase}: {} s", start.elapsed().as_secs()), false);
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        if is_terminal && current.is_some() {
                            say("", true);
                        }
                        return;
                    }
                }
            }
        });
        Self { phases, writer }
    }

    fn begin(&self, phase: String) {
        // The writer thread outlives `self`, so the channel is open.
        let _ = self.phases.send(phase);
    }

    fn end(self) {
        drop(self.phases);
        let _ = self.writer.join();
    }
}
