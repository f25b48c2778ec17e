//! The arguments of `maxtext data clean`.

use std::path::PathBuf;

use clap::Args;

pub const CLEAN: &str = "\
Removes documents from files of text, JSON lines, parquet, ArrayRecord or
TFRecord, and writes the others into a directory, with a report.

Documents pass these steps in order, as far as options name them: `--language`;
the sets of rules `gopher_repetition`, `gopher_quality`, `c4` and `fineweb`
(`--rules`); a classifier of quality (`--good`, `--bad`); passages of evaluation
data (`--evaluation`); masks for personal data (`--mask`). Equal documents are
removed unless `--keep-equal` is set, and similar ones with `--near`. The first
document of a group remains.

The memory is bounded by `--memory-mb`; what does not fit is on disk, in the
directory `work` of the output. The same command goes on after Ctrl-C or a
crash. `report.txt` and `report.json` count what each rule removed, with
samples.";

pub const CLEAN_EXAMPLES: &str = "\
Examples:
  maxtext data clean 'web/*.jsonl.gz' --output cleaned --language english \\
      --rules gopher_repetition,gopher_quality,c4,fineweb --near \\
      --mask email,ip --to parquet
  maxtext data clean web.parquet --output scored --good 'books/*.txt' \\
      --bad 'spam/*.jsonl' --quality 0.3 --evaluation 'benchmarks/*.jsonl'
  maxtext data clean web.jsonl --output verdicts --rules c4 --annotate";

#[derive(Debug, Args)]
pub struct DataClean {
    /// The files to read: paths or patterns
    #[arg(required = true)]
    pub files: Vec<String>,
    /// The directory for the output
    #[arg(long, short, value_name = "DIRECTORY")]
    pub output: PathBuf,
    /// The column of the text
    #[arg(long, value_name = "COLUMN", default_value = "text")]
    pub column: String,
    /// The format of the output
    #[arg(long, value_name = "FORMAT", default_value = "jsonl")]
    pub to: String,
    /// The compression of the output: `none`, `gzip`, `zstd`, `brotli` or `snappy`, as far as the format has it
    #[arg(long, value_name = "NAME")]
    pub compression: Option<String>,
    /// Mebibytes of text in an output file, about
    #[arg(long, value_name = "MEBIBYTES", default_value_t = 512)]
    pub file_mb: u64,
    /// Languages that remain, by names or codes, separated by commas
    #[arg(long, value_name = "LANGUAGES", value_delimiter = ',')]
    pub language: Vec<String>,
    /// The least confidence in the language, from 0 to 1
    #[arg(long, value_name = "CONFIDENCE", default_value_t = 0.65)]
    pub language_confidence: f64,
    /// Sets of rules, separated by commas, in the order in which they are applied
    #[arg(long, value_name = "RULES", value_delimiter = ',')]
    pub rules: Vec<String>,
    /// A JSON file with other thresholds than the published ones, such as `{"gopher_quality": {"min_words": 20}}`
    #[arg(long, value_name = "FILE")]
    pub thresholds: Option<PathBuf>,
    /// Files of good documents, from which the classifier of quality learns
    #[arg(long, value_name = "FILES")]
    pub good: Vec<String>,
    /// Files of bad documents, from which the classifier of quality learns
    #[arg(long, value_name = "FILES")]
    pub bad: Vec<String>,
    /// A classifier that an earlier command wrote, `quality.bin`
    #[arg(long, value_name = "FILE")]
    pub classifier: Option<PathBuf>,
    /// The least probability of a good document
    #[arg(long, value_name = "PROBABILITY", default_value_t = 0.5)]
    pub quality: f64,
    /// Files of evaluation data, whose passages documents must not hold
    #[arg(long, value_name = "FILES")]
    pub evaluation: Vec<String>,
    /// The words of such a passage
    #[arg(long, value_name = "WORDS", default_value_t = 13)]
    pub evaluation_n_gram: usize,
    /// Personal data to mask, separated by commas: `email`, `ip`, `phone`
    #[arg(long, value_name = "KINDS", value_delimiter = ',')]
    pub mask: Vec<String>,
    /// Keep documents that are equal to earlier ones
    #[arg(long)]
    pub keep_equal: bool,
    /// Remove documents that are similar to earlier ones
    #[arg(long)]
    pub near: bool,
    /// The words of a shingle, by which documents are similar
    #[arg(long, value_name = "WORDS", default_value_t = 5, requires = "near")]
    pub near_n_gram: usize,
    /// The bands of minimal hashes, of which similar documents share one
    #[arg(long, value_name = "BANDS", default_value_t = 14, requires = "near")]
    pub near_bands: usize,
    /// The minimal hashes of a band
    #[arg(long, value_name = "HASHES", default_value_t = 8, requires = "near")]
    pub near_rows: usize,
    /// The seed of the hash functions
    #[arg(long, value_name = "SEED", default_value_t = 1, requires = "near")]
    pub near_seed: u64,
    /// Keep all documents unchanged, and write the verdict of each step into the column `removed_by`
    #[arg(long)]
    pub annotate: bool,
    /// Leave out records that cannot be read, and count them
    #[arg(long)]
    pub skip_damaged: bool,
    /// The bound of the memory in mebibytes
    #[arg(long, value_name = "MEBIBYTES", default_value_t = 1024)]
    pub memory_mb: u64,
    /// The samples of each rule in the report
    #[arg(long, value_name = "SAMPLES", default_value_t = 3)]
    pub samples: usize,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}
