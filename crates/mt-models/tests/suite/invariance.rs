//! Models whose results for a token do not depend on the other tokens of a program.

use std::fs;

use mt_config::{Config, ModelGroup, Request};
use mt_models::{ModelError, build_decoder};

use crate::directory::Directory;

/// The computation for which the mode is refused, if it is.
fn refused(group: &ModelGroup) -> Option<String> {
    match build_decoder(group) {
        Ok(_) => None,
        Err(ModelError::NotInvariant { computation }) => Some(computation),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn published_models_are_invariant_or_refused_by_name() {
    let expected = |name: &str| -> Option<&str> {
        let computations = [
            ("qwen3_next", "gated_delta"),
            ("qwen3_5_dense_irregular", "attention with gates"),
            ("qwen3_5", "gated_delta"),
            ("deepseek32", "attention to keys that an indexer chooses"),
            ("deepseek4", "hyper-connections"),
            ("llama_dynamic_ntk", "dynamic NTK"),
            ("t5", "an encoder"),
        ];
        let named = computations.into_iter().find(|(beginning, _)| name.starts_with(beginning));
        named.map(|(_, computation)| computation)
    };
    let (mut num_invariant, mut num_refused) = (0, 0);
    for entry in fs::read_dir(Directory::open("").path).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let directory = Directory::open(&name);
        if !directory.path.join("config.json").is_file() {
            continue;
        }
        let refused = refused(&directory.group(&["batch_invariant=true"]).unwrap());
        match (&refused, expected(&name)) {
            (None, None) => num_invariant += 1,
            (Some(refused), Some(expected)) if refused.starts_with(expected) => num_refused += 1,
            (_, expected) => panic!("{name}: {refused:?}, not {expected:?}"),
        }
    }
    assert!(num_invariant > 30 && num_refused > 6, "{num_invariant} and {num_refused}");
}

#[test]
fn options_that_depend_on_other_tokens_are_refused() {
    let experts = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=40";
    let cases = [
        ("decoder_block=llama2".to_owned(), None),
        (experts.to_owned(), None),
        (
            format!("{experts} sparse_matmul=false capacity_factor=1.5"),
            Some("experts that drop tokens (`capacity_factor`) in layer 0"),
        ),
        (
            "decoder_block=llama2 attention_type=block_diffusion".to_owned(),
            Some("attention within blocks in layer 0"),
        ),
    ];
    for (keys, expected) in cases {
        let keys = keys.split(' ').chain(["batch_invariant=true"]).map(str::to_owned);
        let config = Config::resolve(&Request { arguments: keys.collect(), ..Request::default() }).unwrap();
        let group = ModelGroup::from_config(&config).unwrap();
        assert_eq!(refused(&group).as_deref(), expected, "{:?}", group.decoder_block);
    }
}
