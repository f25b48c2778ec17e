//! Compiles a file of StableHLO text for hardware that this machine does not have, and prints its memory use.
//!
//! `topology PLATFORM TOPOLOGY FILE [DEVICES]`, such as `topology tpu v5e:2x4 step.mlir 8`

use std::{env, error::Error, fs};

use mt_pjrt::{CompileOptions, Platform, Plugin, Topology, find_or_install, prepare_environment};

fn main() -> Result<(), Box<dyn Error>> {
    prepare_environment();
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [platform, name, file, devices @ ..] = &arguments[..] else {
        return Err("give a platform, a topology and a file".into());
    };
    let plugin = Plugin::load(
        &find_or_install(platform.parse::<Platform>()?, None, &mut |begins| println!("{begins}"))?.path,
    )?;
    let topology = Topology::new(&plugin, name, &[])?;
    println!("{topology:?}: {:?}", topology.devices().first());
    let count = devices.first().map_or(Ok(topology.devices().len()), |count| count.parse())?;
    let program = topology.compile(file, &fs::read_to_string(file)?, &CompileOptions::on_first(count))?;
    println!("{:#?}", program.memory()?);
    Ok(())
}
