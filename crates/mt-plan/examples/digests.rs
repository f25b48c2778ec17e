//! Prints digests of the programs of many configurations. Two commits that print the same lines trace the same
//! programs.
//!
//! Usage: digests [WORD]…, which selects the configurations that contain every word

use std::error::Error;

use mt_config::{Config, DecodeConfig, Request, TrainConfig};
use mt_engine::DecodePlan;
use mt_runtime::Platform;
use mt_shape::DeviceAttributes;
use mt_train::{Devices, TrainPlan};
use sha2::{Digest, Sha256};

/// Keys of every configuration; a variant overrides them.
const COMMON: &str = "dataset_type=synthetic run_name=digests base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 \
    head_dim=16 base_mlp_dim=96 base_num_decoder_layers=7 vocab_size=256 max_target_length=64 \
    max_prefill_predict_length=16 per_device_batch_size=4 steps=10 optimizer_space=published";

const FAMILIES: [&str; 14] = [
    "decoder_block=default",
    "decoder_block=llama2",
    "decoder_block=mistral",
    "decoder_block=gemma",
    "decoder_block=gemma2",
    "decoder_block=gemma3 sliding_window_size=24",
    "model_name=gemma4-e2b override_model_config=true scan_layers=false base_num_decoder_layers=15 num_kv_shared_layers=5",
    "decoder_block=qwen2 attention_bias=true",
    "decoder_block=qwen3 use_qk_norm=true",
    "decoder_block=olmo3 sliding_window_size=24",
    "decoder_block=gpt3 base_num_kv_heads=4",
    "decoder_block=simple",
    "decoder_block=simple_mlp",
    "decoder_block=llama2 base_num_kv_heads=4 use_qk_clip=true",
];

const VARIANTS: [&str; 14] = [
    "",
    "scan_layers=false",
    "dtype=float32 remat_policy=none",
    "remat_policy=minimal_with_context",
    "remat_policy=save_qkv_proj gradient_accumulation_steps=2",
    "num_vocab_tiling=2 z_loss_multiplier=0.001",
    "enable_dropout=true dropout_rate=0.1",
    "attention=flash max_target_length=1024",
    "logits_via_embedding=true skip_step_on_spikes=true",
    "opt_type=muon",
    "opt_type=adafactor",
    "devices=8 ici_fsdp_parallelism=4 ici_tensor_parallelism=2",
    "devices=8 ici_data_parallelism=2 ici_fsdp_parallelism=1 ici_context_parallelism=4 shard_optimizer_over_data=true",
    "platform=tpu remat_policy=minimal_offloaded optimizer_memory_host_offload=true",
];

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    for family in FAMILIES {
        for variant in VARIANTS {
            let keys = format!("{family} {variant}");
            if words.iter().all(|word| keys.contains(word.as_str())) {
                report(&keys);
            }
        }
    }
    Ok(())
}

fn report(keys: &str) {
    match digests(keys) {
        Ok(digests) => println!("{keys}: {digests}"),
        Err(error) => println!("{keys}: {}", error.to_string().lines().next().unwrap_or_default()),
    }
}

fn digests(keys: &str) -> Result<String, Box<dyn Error>> {
    let (mut platform, mut number) = (Platform::Cpu, 1);
    let mut arguments: Vec<String> = Vec::new();
    for argument in COMMON.split_whitespace().chain(keys.split_whitespace()) {
        let key = argument.split('=').next();
        arguments.retain(|earlier| earlier.split('=').next() != key);
        match argument {
            "platform=tpu" => platform = Platform::Tpu,
            "devices=8" => number = 8,
            _ => arguments.push(argument.to_owned()),
        }
    }
    if number > 1 {
        arguments.push(format!("num_cpu_devices={number}"));
    }
    let config = Config::resolve(&Request { arguments, ..Request::default() })?;
    let devices = Devices { platform, number, attributes: DeviceAttributes::default() };
    let plan = TrainPlan::new(TrainConfig::from_config(&config)?, &devices)?;
    let mut texts = vec![plan.initialize()?.text, plan.train_step()?.text];
    let decoding = DecodeConfig::from_config(&config).map_err(Box::<dyn Error>::from).and_then(|settings| {
        let plan = DecodePlan::new(settings, platform, number, &devices.attributes)?;
        Ok([plan.prefill()?.text, plan.step()?.text])
    });
    let failure = match decoding {
        Ok(programs) => {
            texts.extend(programs);
            String::new()
        }
        Err(error) => format!(" ({})", error.to_string().lines().next().unwrap_or_default()),
    };
    let digests: Vec<String> = texts
        .iter()
        .map(|text| {
            Sha256::digest(text.as_bytes()).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
        })
        .collect();
    Ok(digests.join(" ") + &failure)
}
