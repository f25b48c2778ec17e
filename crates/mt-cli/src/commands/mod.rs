//! One module a subcommand.

pub mod checkpoint;
pub mod completion;
pub mod config;
pub mod decode;
pub mod plugin;
pub mod tokenizer;
pub mod train;

use mt_config::Config;

/// Says what is worth knowing about a configuration though nothing is wrong with it.
fn warn(config: &Config) {
    for note in config.notes() {
        eprintln!("warning: {note}");
    }
}
