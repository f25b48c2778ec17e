//! The key table: every configuration key once, and what follows from it: YAML files, `key=value`, the environment,
//! where each value came from, errors, explanations and the reference page.
//!
//! Phase: before everything else. [`Config::resolve`] merges the layers; [`TrainConfig`] and [`DecodeConfig`] turn the
//! result into small typed groups, which is all that other crates see. Of the workspace only `mt-shape` is below.

#![forbid(unsafe_code)]

mod coerce;
mod config;
mod derived;
mod error;
mod groups;
mod key;
mod named;
mod notice;
mod origin;
mod record;
mod reference;
mod resolve;
mod suggest;
pub mod table;
mod topology;
mod unnamed_data;
mod yaml;

pub use coerce::value_text;
pub use config::{Config, Difference, Entry, yaml_text};
pub use error::{ConfigError, Problem};
pub use groups::{
    AbsentHardware, AheadGroup, AttentionGroup, AttentionKind, AttentionType, BatchSchedule, CheckpointGroup,
    ContextGroup, DataGroup, DatasetType, DebugGroup, DecodeConfig, DecodeGroup, DecoderBlock, Hardware,
    HfTextUnit, KeptIn, LayerAttention, LearningRateSchedule, LoadConfig, LogitsGroup, MatmulPrecision,
    MlpActivation, ModelGroup, ObjectiveGroup, OptimizerGroup, OptimizerSpace, OptimizerSpaceChoice,
    OptimizerType, PackingType, Parallelism, PlacementGroup, PositionGroup, RematGroup, RematPolicy,
    RopeType, RunGroup, SamplingStrategy, TensorLocation, TokenizerGroup, TokenizerType, TrainConfig,
    WsdDecayStyle, is_published_model, run_directory_of, saved_config_path, tokenizer_directory,
};
pub use key::{Class, Key, Kind, Literal};
pub use named::{Named, model_names, nearest_names, preset_names};
pub use notice::Notice;
pub use origin::Origin;
pub use record::RunRecord;
pub use reference::{explain, reference_page};
pub use resolve::{ModelDescription, Request};
pub use topology::{CHIPS, Chip, CompileTopology};
