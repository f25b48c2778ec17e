//! Times the parsing and resolution of a configuration: `cargo bench -p mt-config`.

use std::{fs, hint::black_box, time::Instant};

use mt_config::{Config, Request, TrainConfig};

/// Runs of each case; the median is shown.
const RUNS: usize = 201;

/// The limit for one command line, in milliseconds.
const ALLOWED: f64 = 20.0;

fn main() {
    let directory = tempfile::tempdir().expect("the machine has a place for temporary files");
    let whole = directory.path().join("whole.yml");
    fs::write(&whole, Config::defaults().to_yaml().replace("resolved: true", "resolved: false"))
        .expect("temporary files are written");
    let lines = fs::read_to_string(&whole).map_or(0, |text| text.lines().count());
    let whole = whole.to_string_lossy().into_owned();
    let keys = "run_name=bench per_device_batch_size=2 max_target_length=2048 steps=100 learning_rate=3e-5 \
                dataset_type=synthetic enable_checkpointing=false ici_fsdp_parallelism=4 remat_policy=minimal \
                attention=dot_product";
    let documented: Vec<&str> =
        ["src/maxtext/configs/base.yml", "model_name=llama2-7b"].into_iter().chain(keys.split(' ')).collect();
    let own: Vec<&str> =
        [whole.as_str(), "model_name=llama2-7b"].into_iter().chain(keys.split(' ')).collect();
    let cases = [
        ("base.yml, a model and 10 keys".to_owned(), documented),
        (format!("a file of {lines} lines, a model and 10 keys"), own),
    ];
    let mut is_slow = false;
    for (name, arguments) in cases {
        let request =
            Request { arguments: arguments.into_iter().map(str::to_owned).collect(), ..Request::default() };
        let (first, median) = measured(&request);
        println!("{name}: {median:.2} ms, {first:.2} ms the first time");
        is_slow |= first > ALLOWED || median > ALLOWED;
    }
    if is_slow {
        println!("slower than the {ALLOWED} ms that a command line may take");
        std::process::exit(1);
    }
}

/// Milliseconds of the first run, and the median.
fn measured(request: &Request) -> (f64, f64) {
    let mut times: Vec<f64> = Vec::new();
    for _ in 0..RUNS {
        let begun = Instant::now();
        let config = Config::resolve(black_box(request)).expect("the command line has no mistakes");
        let _ = black_box(TrainConfig::from_config(&config));
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let first = times[0];
    times.sort_by(f64::total_cmp);
    (first, times[RUNS / 2])
}
