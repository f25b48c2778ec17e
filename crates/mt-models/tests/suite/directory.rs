//! Models in Hugging Face directories with the results of transformers; `goldens/families/generate.py` generates them.

use std::path::{Path, PathBuf};

use mt_config::{Config, ModelGroup, Request, value_text};
use mt_models::{
    Model, ModelError, Storage, build_decoder,
    decoder::Decoder,
    hugging_face::{Weights, settings_of},
};
use mt_runtime::testing;
use mt_shape::{DType, HostArray, Placement};

use crate::harness::{Batch, Golden, golden};

/// A directory that holds a model.
pub struct Directory {
    pub name: String,
    pub path: PathBuf,
}

impl Directory {
    /// Opens one of the directories of reference models.
    pub fn open(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/families").join(name);
        Self { name: name.to_owned(), path }
    }

    /// The results of transformers: logits, hidden states, and their tokens.
    pub fn golden(&self) -> Golden {
        self.values("golden")
    }

    /// The tensors of one safetensors file in the directory.
    pub fn values(&self, file: &str) -> Golden {
        golden(&format!("families/{}/{file}.safetensors", self.name))
    }

    /// The configuration from the directory's `config.json` and further keys. Later values of a key replace earlier
    /// ones.
    pub fn group(&self, keys: &[&str]) -> Result<ModelGroup, ModelError> {
        let settings = settings_of(&self.path)?.into_pairs();
        let key_of = |argument: &str| argument.split('=').next().unwrap().to_owned();
        let replaced = |key: &str| keys.iter().any(|argument| key_of(argument) == key);
        let mut arguments: Vec<String> = settings
            .into_iter()
            .chain([("dtype", "float32".into())])
            .filter(|(key, _)| !replaced(key))
            .map(|(key, value)| format!("{key}={}", value_text(&value)))
            .collect();
        arguments.extend(keys.iter().map(|key| (*key).to_owned()));
        let config = Config::resolve(&Request { arguments, ..Request::default() })
            .unwrap_or_else(|error| panic!("{}: {error}", self.name));
        Ok(ModelGroup::from_config(&config).unwrap_or_else(|error| panic!("{}: {error}", self.name)))
    }

    #[track_caller]
    pub fn model(&self, keys: &[&str]) -> Decoder {
        let built = self.group(keys).and_then(|group| build_decoder(&group));
        built.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The weights in `f32`.
    #[track_caller]
    pub fn parameters(&self, model: &dyn Model) -> Vec<HostArray> {
        let weights =
            Weights::open(model, &self.path).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        let arrays = weights.load(testing::cpu(1), &Placement::single(), model, Some(DType::F32)).unwrap();
        arrays.iter().map(|array| array.to_host().unwrap()).collect()
    }

    /// The tokens of the reference values, one document per row.
    pub fn batch(&self) -> Batch {
        let tokens = self.golden().array("tokens");
        let [rows, length] = *tokens.dims() else { panic!("tokens have two dimensions") };
        let mut batch = Batch::whole(rows, length, 8);
        batch.arrays[0] = tokens;
        batch
    }

    /// The supported values of `scan_layers`. Layers that share keys and values cannot be scanned.
    pub fn scans(&self) -> &'static [&'static str] {
        let unrolled: &[&str] = &["scan_layers=false"];
        let shares = self.model(unrolled).otherwise_scanned().is_none();
        if shares { unrolled } else { &["scan_layers=true", "scan_layers=false"] }
    }
}
