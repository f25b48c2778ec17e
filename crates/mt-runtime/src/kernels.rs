//! The kernels that programs call on this processor.
//!
//! Kernels that can replace each other are timed once per processor model, in about ten milliseconds. The user's cache
//! holds the times as text, so that every run on a machine makes the same choice. A missing or damaged file is measured
//! again. Builds for development have times of their own.

use std::{
    env, fmt, fs, io,
    path::{Path, PathBuf},
    process,
    sync::Mutex,
};

use mt_kernels::{
    Arithmetic, Candidate, Features, KERNEL_SET, Kernels, Purpose, Support, Timing, UnknownFeature, fastest,
    measure,
};
use sha2::{Digest, Sha256};

use crate::{
    RuntimeError,
    cache::write_atomically,
    error::quoted,
    fingerprint::{Fingerprint, hexadecimal, processor, processor_name},
};

/// The environment variable that names the features that kernels may use.
pub const CPU_FEATURES_VARIABLE: &str = "MAXTEXT_CPU_FEATURES";

/// The environment variable that names kernels to use without measuring.
pub const CPU_KERNELS_VARIABLE: &str = "MAXTEXT_CPU_KERNELS";

/// The kind of this build. The checks of a development build slow some kernels down more than others, so its times must not
/// choose the kernels of an optimized one.
const BUILD: &str = if cfg!(debug_assertions) { "development" } else { "optimized" };

/// The kernels in use and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// The processor's name.
    pub processor: String,
    /// The features that kernels use.
    pub features: Features,
    /// Whether the environment names them.
    pub features_are_named: bool,
    /// The file that holds the times.
    pub file: Option<PathBuf>,
    /// The choices for the types with kernels.
    pub choices: Vec<KernelChoice>,
}

impl KernelReport {
    /// The choices as text, by which a run is compared with its resumption: equal kernels give equal bits.
    pub fn fingerprint(&self) -> String {
        let choice = |choice: &KernelChoice| label(choice.arithmetic, choice.purpose, choice.kernel);
        // Programs do not multiply integers yet.
        let used = self.choices.iter().filter(|choice| choice.arithmetic != Arithmetic::Int8);
        used.map(choice).collect::<Vec<_>>().join(", ")
    }

    /// The types that are left to XLA.
    pub fn without_kernels(&self) -> impl Iterator<Item = Arithmetic> {
        let has_kernels = |arithmetic| self.choices.iter().any(|choice| choice.arithmetic == arithmetic);
        let types = [Arithmetic::F32, Arithmetic::Bf16];
        types.into_iter().filter(move |arithmetic| !has_kernels(*arithmetic))
    }
}

/// A kernel in use and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelChoice {
    pub arithmetic: Arithmetic,
    pub purpose: Purpose,
    pub kernel: &'static Candidate,
    pub reason: Reason,
    /// The times of the kernels that were compared.
    pub timings: Vec<Timing>,
}

/// The reason for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No other kernel uses these features for this purpose.
    Only,
    /// Times measured by this process.
    Measurement,
    /// Times measured by an earlier process.
    Cache,
    /// [`CPU_KERNELS_VARIABLE`].
    Override,
}

impl Reason {
    /// A word for lists.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Only => "only one",
            Self::Measurement => "measurement",
            Self::Cache => "cache",
            Self::Override => "override",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reports the kernels that programs call. The first call chooses and installs them.
///
/// # Errors
/// The environment names features or kernels that do not exist, or kernels that cannot run here.
pub fn kernels_in_use() -> Result<KernelReport, RuntimeError> {
    static REPORT: Mutex<Option<KernelReport>> = Mutex::new(None);
    let mut known = REPORT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(report) = &*known {
        return Ok(report.clone());
    }
    let directory = mt_pjrt::cache_directory().ok().map(|directory| directory.join("kernels"));
    let (features, features_are_named) = features()?;
    let named = named_kernels(&variable(CPU_KERNELS_VARIABLE).unwrap_or_default(), features)?;
    let (choices, file) = choose(features, &named, directory.as_deref());
    let kernels = choices.iter().fold(Kernels::preferred(features), |kernels, choice| {
        kernels.with(choice.arithmetic, choice.purpose, choice.kernel)
    });
    kernels.install();
    let report = KernelReport { processor: processor_name(), features, features_are_named, file, choices };
    Ok(known.insert(report).clone())
}

/// The types for which programs call kernels.
///
/// # Errors
/// The environment names features that do not exist.
pub(crate) fn support() -> Result<Support, RuntimeError> {
    Ok(Support::of(features()?.0))
}

/// The features that kernels use, and whether the environment names them.
fn features() -> Result<(Features, bool), RuntimeError> {
    match variable(CPU_FEATURES_VARIABLE) {
        None => Ok((Features::detect(), false)),
        Some(list) => match Features::named(&list) {
            Ok(features) => Ok((features, true)),
            Err(UnknownFeature(word)) => Err(RuntimeError::CpuFeature { word }),
        },
    }
}

/// A variable's value, if it is set to something.
fn variable(name: &str) -> Option<String> {
    let value = env::var_os(name)?.to_string_lossy().into_owned();
    Some(value).filter(|value| !value.is_empty())
}

/// The kernels that a list names.
fn named_kernels(list: &str, features: Features) -> Result<Vec<&'static Candidate>, RuntimeError> {
    let contenders = |arithmetic| Candidate::contenders(features, arithmetic, Purpose::ManyRows);
    let available: Vec<_> = supported(features).flat_map(contenders).collect();
    let words = list.split(',').map(str::trim).filter(|_| !list.is_empty());
    let find = |word: &str| {
        let found = available.iter().find(|candidate| candidate.name() == word).copied();
        found.ok_or_else(|| RuntimeError::CpuKernel {
            word: word.to_owned(),
            problem: match Candidate::names().any(|name| name == word) {
                true => format!("no kernel for the features `{features}`"),
                false => "no kernel".to_owned(),
            },
            hint: match &available[..] {
                [] => "there is none for these features".to_owned(),
                _ => format!("use some of {}", quoted(available.iter().map(|candidate| candidate.name()))),
            },
        })
    };
    words.map(find).collect()
}

/// The kernel for each purpose, and the file of times if any had to be compared.
fn choose(
    features: Features,
    named: &[&'static Candidate],
    directory: Option<&Path>,
) -> (Vec<KernelChoice>, Option<PathBuf>) {
    let mut choices = Vec::new();
    for arithmetic in supported(features) {
        for purpose in Purpose::ALL {
            let contenders = Candidate::contenders(features, arithmetic, purpose);
            // A kernel for this arithmetic comes before the kernels of another one.
            let mut usable: Vec<_> = named.iter().filter(|named| contenders.contains(named)).collect();
            usable.sort_by_key(|named| named.arithmetic() != arithmetic);
            let named = usable.first();
            let (kernel, reason) = match (named, &contenders[..]) {
                (Some(named), _) => (**named, Reason::Override),
                (None, [first, others @ ..]) => {
                    (*first, if others.is_empty() { Reason::Only } else { Reason::Measurement })
                }
                (None, []) => continue,
            };
            choices.push(KernelChoice { arithmetic, purpose, kernel, reason, timings: Vec::new() });
        }
    }
    if choices.iter().all(|choice| choice.reason != Reason::Measurement) {
        return (choices, None);
    }
    let mut file = directory.map(|directory| TimesFile::new(directory, features));
    let kept = file.as_ref().and_then(TimesFile::read);
    let mut timings = kept.clone().unwrap_or_else(|| measure_all(features));
    if kept.is_none() {
        // A cache that cannot be written costs time only.
        file = file.filter(|file| file.publish(&timings).is_ok());
        // Processes that measure at once all choose from the file of the first one.
        timings = file.as_ref().and_then(TimesFile::read).unwrap_or(timings);
    }
    for choice in choices.iter_mut().filter(|choice| choice.reason == Reason::Measurement) {
        let is_own =
            |timing: &&Timing| timing.purpose == choice.purpose && timing.arithmetic == choice.arithmetic;
        choice.timings = timings.iter().filter(is_own).copied().collect();
        choice.kernel = fastest(choice.timings.iter().copied()).unwrap_or(choice.kernel);
        choice.reason = if kept.is_some() { Reason::Cache } else { Reason::Measurement };
    }
    (choices, file.map(|file| file.path))
}

/// The types for which programs call kernels.
fn supported(features: Features) -> impl Iterator<Item = Arithmetic> {
    let support = Support::of(features);
    Arithmetic::ALL.into_iter().filter(move |arithmetic| match arithmetic {
        Arithmetic::F32 => support.f32,
        Arithmetic::Bf16 => support.bf16,
        Arithmetic::Bf16X3 | Arithmetic::Int8 => {
            Candidate::available(features, *arithmetic).iter().any(|candidate| !candidate.is_portable())
        }
    })
}

/// The purposes with several contenders, and these in order of preference.
fn comparisons(features: Features) -> impl Iterator<Item = (Arithmetic, Purpose, Vec<&'static Candidate>)> {
    let all = supported(features).flat_map(|arithmetic| Purpose::ALL.map(|purpose| (arithmetic, purpose)));
    all.map(move |(arithmetic, purpose)| {
        (arithmetic, purpose, Candidate::contenders(features, arithmetic, purpose))
    })
    .filter(|(_, _, contenders)| contenders.len() > 1)
}

fn measure_all(features: Features) -> Vec<Timing> {
    let measured = |(arithmetic, purpose, _)| measure(features, arithmetic, purpose);
    comparisons(features).flat_map(measured).collect()
}

/// The file of times for this processor model and some features: lines that describe the processor and the kernels, a line
/// per time, and a hash of all lines before it.
struct TimesFile {
    path: PathBuf,
    /// The lines that describe the processor and the kernels.
    heading: String,
    features: Features,
}

impl TimesFile {
    fn new(directory: &Path, features: Features) -> Self {
        let mut key = Fingerprint::default();
        key.add(processor()).add(features.to_string()).add(KERNEL_SET.to_le_bytes()).add(BUILD);
        let key = hexadecimal(&key.finish()[..8]);
        let heading = format!(
            "# The least times of kernels on one thread of {}, in nanoseconds. Measured anew if this file is removed.\n\
             kernels {KERNEL_SET} features {features} build {BUILD}\n",
            processor_name()
        );
        Self { path: directory.join(format!("{key}.times")), heading, features }
    }

    /// Writes the file unless another process has written it meanwhile. A damaged file is replaced.
    fn publish(&self, timings: &[Timing]) -> io::Result<()> {
        let own = self.path.with_extension(format!("{}.times", process::id()));
        write_atomically(&own, &[self.text(timings).as_bytes()])?;
        if self.path.exists() && self.read().is_none() {
            fs::remove_file(&self.path)?;
        }
        // Unlike renaming, linking does not replace an existing file.
        let linked = match fs::hard_link(&own, &self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        };
        fs::remove_file(&own)?;
        linked
    }

    /// The times, if the file is there and whole.
    fn read(&self) -> Option<Vec<Timing>> {
        let text = fs::read_to_string(&self.path).ok()?;
        let mut lines = text.strip_prefix(&self.heading)?.lines();
        let mut timings = Vec::new();
        for (arithmetic, purpose, contenders) in comparisons(self.features) {
            for candidate in contenders {
                let line = lines.next()?.strip_prefix(&label(arithmetic, purpose, candidate))?;
                let nanoseconds = line.trim().parse().ok()?;
                timings.push(Timing { arithmetic, purpose, candidate, nanoseconds });
            }
        }
        // An altered file has another hash.
        (self.text(&timings) == text).then_some(timings)
    }

    fn text(&self, timings: &[Timing]) -> String {
        let mut text = self.heading.clone();
        for timing in timings {
            let label = label(timing.arithmetic, timing.purpose, timing.candidate);
            text += &format!("{label} {}\n", timing.nanoseconds);
        }
        let hash = hexadecimal(&Sha256::digest(&text)[..8]);
        text + "sha256 " + &hash + "\n"
    }
}

fn label(arithmetic: Arithmetic, purpose: Purpose, candidate: &Candidate) -> String {
    format!("{} {} {}", arithmetic.name(), purpose.name(), candidate.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Features with something to compare, if this processor has such.
    fn features() -> Option<Features> {
        Some(Features::detect()).filter(|features| {
            choose(*features, &[], None).0.iter().any(|choice| choice.reason == Reason::Measurement)
        })
    }

    fn reasons(choices: &[KernelChoice]) -> Vec<Reason> {
        choices.iter().map(|choice| choice.reason).filter(|reason| *reason != Reason::Only).collect()
    }

    #[test]
    fn times_are_measured_once() {
        let Some(features) = features() else { return };
        let directory = tempfile::tempdir().unwrap();
        let (first, file) = choose(features, &[], Some(directory.path()));
        assert!(reasons(&first).iter().all(|reason| *reason == Reason::Measurement), "{first:?}");
        let text = fs::read_to_string(file.unwrap()).unwrap();
        assert!(text.contains(&processor_name()) && text.contains(&features.to_string()), "{text}");
        assert!(text.lines().nth(1).unwrap().ends_with(&format!(" build {BUILD}")), "{text}");
        let (second, _) = choose(features, &[], Some(directory.path()));
        assert!(reasons(&second).iter().all(|reason| *reason == Reason::Cache), "{second:?}");
        for (first, second) in first.iter().zip(&second) {
            assert_eq!((first.kernel, &first.timings), (second.kernel, &second.timings));
        }
    }

    #[test]
    fn kept_times_decide() {
        let Some(features) = features() else { return };
        let directory = tempfile::tempdir().unwrap();
        let file = TimesFile::new(directory.path(), features);
        let mut timings = measure_all(features);
        // The last contender of each comparison is the fastest by far.
        let mut expected = Vec::new();
        for (arithmetic, purpose, contenders) in comparisons(features) {
            let last = contenders[contenders.len() - 1];
            expected.push((arithmetic, purpose, last));
            for timing in &mut timings {
                if timing.purpose == purpose && timing.arithmetic == arithmetic {
                    timing.nanoseconds = if timing.candidate == last { 10 } else { 1000 };
                }
            }
        }
        write_atomically(&file.path, &[file.text(&timings).as_bytes()]).unwrap();
        let (choices, _) = choose(features, &[], Some(directory.path()));
        let compared = choices.iter().filter(|choice| choice.reason == Reason::Cache);
        let chosen: Vec<_> =
            compared.map(|choice| (choice.arithmetic, choice.purpose, choice.kernel)).collect();
        assert!(!chosen.is_empty() && chosen.iter().all(|choice| expected.contains(choice)), "{chosen:?}");
    }

    #[test]
    fn damaged_times_are_measured_again() {
        let Some(features) = features() else { return };
        let directory = tempfile::tempdir().unwrap();
        let file = TimesFile::new(directory.path(), features);
        let timings = measure_all(features);
        write_atomically(&file.path, &[file.text(&timings).as_bytes()]).unwrap();
        assert_eq!(file.read(), Some(timings.clone()));
        let whole = fs::read(&file.path).unwrap();
        for position in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[position] ^= 4;
            fs::write(&file.path, damaged).unwrap();
            assert_eq!(file.read(), None, "byte {position}");
            fs::write(&file.path, &whole[..position]).unwrap();
            assert_eq!(file.read(), None, "length {position}");
        }
        fs::write(&file.path, [&whole[..], b"f32 more\n"].concat()).unwrap();
        assert_eq!(file.read(), None);
        let (choices, _) = choose(features, &[], Some(directory.path()));
        assert!(reasons(&choices).iter().all(|reason| *reason == Reason::Measurement));
        assert!(file.read().is_some(), "the damaged file was replaced");
    }

    #[test]
    fn times_are_of_the_features_in_use() {
        let directory = Path::new("");
        let path = |list: &str| TimesFile::new(directory, Features::named(list).unwrap()).path;
        assert_eq!(path("avx2"), path("avx2"));
        if Features::detect() != Features::named("none").unwrap() {
            assert_ne!(path("avx2"), path("none"));
        }
    }

    #[test]
    fn an_unusable_directory_is_no_failure() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let (choices, file) = choose(Features::detect(), &[], Some(&file.join("below")));
        assert_eq!(file, None);
        assert!(reasons(&choices).iter().all(|reason| *reason == Reason::Measurement));
    }

    #[test]
    fn named_kernels_are_used_for_all_that_they_compute() {
        let features = Features::detect();
        let contenders = |arithmetic| Candidate::contenders(features, arithmetic, Purpose::ManyRows);
        for candidate in supported(features).flat_map(contenders) {
            let named = named_kernels(candidate.name(), features).unwrap();
            assert_eq!(named, [candidate]);
            for choice in choose(features, &named, None).0 {
                let contenders = Candidate::contenders(features, choice.arithmetic, choice.purpose);
                let is_named = contenders.contains(&candidate);
                assert_eq!(choice.reason == Reason::Override, is_named, "{choice:?}");
                assert_eq!(choice.kernel == candidate, is_named || choice.kernel == candidate);
            }
        }
        assert_eq!(named_kernels("", features).unwrap(), Vec::<&Candidate>::new());
        let error = |list: &str, features| named_kernels(list, features).unwrap_err().to_string();
        let unknown = error("avx512_bf17", features);
        assert!(unknown.contains("`avx512_bf17`, which is no kernel\nhint: "), "{unknown}");
        let lacking = error("avx2", Features::named("none").unwrap());
        assert!(lacking.contains("`avx2`, which is no kernel for the features `none`"), "{lacking}");
        assert!(lacking.ends_with("hint: there is none for these features"), "{lacking}");
    }
}
