//! Keys of serving: how prompts are read, and the cache.

use super::group;
use crate::{config::Config, error::Problem};

group! {
    /// How prompts are read, and the cache of pages.
    pub struct ServeGroup {
        prefill_chunk_size: usize,
        enable_model_warmup: bool,
        enable_prefix_caching: Option<bool>,
        prefix_caching_hbm_byte: u64,
        pagedattn_num_pages: usize,
        pagedattn_tokens_per_page: usize,
        pagedattn_max_pages_per_group: Option<usize>,
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
        if self.pages_per_sequence() == Some(0) {
            problems.push(Problem::inconsistent(
                format!("{}, but a sequence needs a page", config.stated("pagedattn_max_pages_per_group")),
                "set at least 1, or -1 for as many pages as `max_target_length` needs",
            ));
        }
    }
}
