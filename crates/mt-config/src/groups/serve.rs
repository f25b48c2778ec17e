//! Keys of serving: how prompts are read, and the cache.

use std::path::PathBuf;

use super::{choices::SpeculativeMethod, group};
use crate::{config::Config, error::Problem};

group! {
    /// How prompts are read, and the cache of pages.
    pub struct ServeGroup {
        prefill_chunk_size: usize,
        enable_model_warmup: bool,
        enable_prefix_caching: Option<bool>,
        prefix_caching_hbm_byte: u64,
        prefix_caching_dram_byte: u64,
        pagedattn_num_pages: usize,
        pagedattn_tokens_per_page: usize,
        pagedattn_max_pages_per_group: Option<usize>,
        speculative_method: Option<SpeculativeMethod>,
        num_speculative_tokens: Option<usize>,
        speculative_model: Option<PathBuf>,
        prompt_lookup_max: usize,
        prompt_lookup_min: usize,
    }
    besides {
        given: Vec<&'static str> = |config, _| Some(given_keys(config)),
    }
}

/// The keys that the user requests. A file may merely repeat MaxText's defaults, which are for other hardware.
fn given_keys(config: &Config) -> Vec<&'static str> {
    let is_given = |key: &&str| config.entry(key).is_asked_for();
    ServeGroup::KEYS.iter().copied().filter(is_given).collect()
}

impl ServeGroup {
    /// The memory of the cache in bytes, if it is set.
    pub fn cache_bytes(&self) -> Option<u64> {
        self.is_given("prefix_caching_hbm_byte").then_some(self.prefix_caching_hbm_byte)
    }

    /// The memory of the host in bytes for pages that lose their places in the cache; 0 if it is not set.
    pub fn host_bytes(&self) -> u64 {
        if self.is_given("prefix_caching_dram_byte") { self.prefix_caching_dram_byte } else { 0 }
    }

    /// The number of pages of the cache, if it is set.
    pub fn num_pages(&self) -> Option<usize> {
        self.is_given("pagedattn_num_pages").then_some(self.pagedattn_num_pages)
    }

    /// The number of tokens in a page, if it is set.
    pub fn page_size(&self) -> Option<usize> {
        self.is_given("pagedattn_tokens_per_page").then_some(self.pagedattn_tokens_per_page)
    }

    /// The maximum number of pages of one sequence, if it is set.
    pub fn pages_per_sequence(&self) -> Option<usize> {
        self.pagedattn_max_pages_per_group
    }

    fn is_given(&self, key: &str) -> bool {
        self.given.contains(&key)
    }

    fn check(&self, config: &Config, problems: &mut Vec<Problem>) {
        if self.cache_bytes().is_some() && self.num_pages().is_some() {
            problems.push(Problem::inconsistent(
                format!(
                    "{} and {}, but either bytes or pages give the size of the cache",
                    config.stated("prefix_caching_hbm_byte"),
                    config.stated("pagedattn_num_pages")
                ),
                "leave out `prefix_caching_hbm_byte` or `pagedattn_num_pages`",
            ));
        }
        if self.host_bytes() > 0 && self.enable_prefix_caching == Some(false) {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but {}, so that no pages are kept",
                    config.stated("prefix_caching_dram_byte"),
                    config.stated("enable_prefix_caching")
                ),
                "leave out one of the two keys",
            ));
        }
        if self.pages_per_sequence() == Some(0) {
            problems.push(Problem::inconsistent(
                format!("{}, but a sequence needs a page", config.stated("pagedattn_max_pages_per_group")),
                "set at least 1, or -1 for as many pages as `max_target_length` needs",
            ));
        }
        self.check_speculation(config, problems);
    }

    fn check_speculation(&self, config: &Config, problems: &mut Vec<Problem>) {
        let Some(method) = self.speculative_method else { return };
        let needs_model = match method {
            SpeculativeMethod::DraftModel | SpeculativeMethod::Medusa | SpeculativeMethod::Eagle => true,
            SpeculativeMethod::NGram | SpeculativeMethod::Mtp => false,
        };
        if needs_model && self.speculative_model.is_none() {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, but no key names the model or the heads that draft",
                    config.stated("speculative_method")
                ),
                "name its directory with `speculative_model`",
            ));
        }
        if method == SpeculativeMethod::NGram && self.prompt_lookup_min > self.prompt_lookup_max {
            problems.push(Problem::inconsistent(
                format!(
                    "{}, more than the {} of `prompt_lookup_max`",
                    config.stated("prompt_lookup_min"),
                    self.prompt_lookup_max
                ),
                "lower `prompt_lookup_min`, or raise `prompt_lookup_max`",
            ));
        }
    }
}
