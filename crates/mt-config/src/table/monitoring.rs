//! Stack traces, monitoring services and elastic training.

use super::{KeyGroup, features};
use crate::key::{Key, Literal};

pub(super) const GROUPS: &[KeyGroup] = &[
    KeyGroup {
        name: "StackTrace",
        title: "Stack traces",
        prefix: None,
        keys: &[
            Key::boolean(
                "collect_stack_trace",
                false,
                "Record the stacks of all threads in `stacks.txt` of the run's directory, at an interval and on \
                 SIGUSR1 and SIGQUIT, to find out why a run hangs.",
            )
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "stack_trace_to_cloud",
                false,
                "Send recorded stacks to a cloud service instead of keeping them in a file.",
            )
            .refused(features::STACKS_IN_THE_CLOUD)
            .only_with("collect_stack_trace", &[])
            .acts_on("monitoring")
            .run_level(),
            Key::integer(
                "stack_trace_interval_seconds",
                600,
                "Seconds between two records of the threads' stacks.",
            )
            .at_least(1.0)
            .only_with("collect_stack_trace", &[])
            .acts_on("monitoring")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "ManagedMLDiagnostics",
        title: "Managed diagnostics",
        prefix: None,
        keys: &[
            Key::boolean(
                "managed_mldiagnostics",
                false,
                "Report configuration, metrics and profiles to Google's managed diagnostics.",
            )
            .no_effect_here(
                "this program uses no monitoring service of Google; `metrics_file` holds the metrics",
            )
            .acts_on("monitoring")
            .run_level(),
            Key::text(
                "managed_mldiagnostics_run_group",
                "",
                "Group that the run belongs to in Google's managed diagnostics.",
            )
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "managed_mldiagnostics_on_demand_profiling",
                true,
                "Let Google's managed diagnostics take a profile at any time.",
            )
            .neutral(&[Literal::Bool(false)])
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
            Key::text(
                "managed_mldiagnostics_region",
                "",
                "Cloud region in which Google's managed diagnostics keep the run.",
            )
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
            Key::text(
                "managed_mldiagnostics_storage_path",
                "",
                "Location in cloud storage where Google's managed diagnostics keep their files.",
            )
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "Goodput",
        title: "Goodput",
        prefix: None,
        keys: &[
            Key::integer(
                "goodput_upload_interval_seconds",
                30,
                "Seconds between two reports of goodput among the metrics; 0 for a report with each step.",
            )
            .at_least(0.0)
            .only_with("monitor_goodput", &[])
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "enable_pathways_goodput",
                false,
                "Report how the time of a job is spent under Pathways.",
            )
            .no_effect_here("Pathways does not run this program; `monitor_goodput` reports how its time is spent")
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "monitor_step_time_deviation",
                true,
                "Report by how much the time of a step differs from the median of recent steps, and warn of a \
                 step that is far slower.",
            )
            .only_with("monitor_goodput", &[])
            .acts_on("monitoring")
            .run_level(),
            Key::integer(
                "step_deviation_interval_seconds",
                30,
                "Seconds between two reports of how far step times differ from the median, and between two \
                 warnings of slow steps.",
            )
            .at_least(0.0)
            .only_with("monitor_goodput", &[])
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "enable_gcp_goodput_metrics",
                true,
                "Send how the time of a job was spent to Google Cloud Monitoring.",
            )
            .neutral(&[Literal::Bool(false)])
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "enable_gcp_step_deviation_metrics",
                true,
                "Send how far step times differ from the usual one to Google Cloud Monitoring.",
            )
            .neutral(&[Literal::Bool(false)])
            .no_effect_here("this program uses no monitoring service of Google")
            .acts_on("monitoring")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "ElasticTraining",
        title: "Elastic training",
        prefix: None,
        keys: &[
            Key::boolean(
                "elastic_enabled",
                false,
                "Continue with the remaining slices when one fails, and readmit it later.",
            )
            .refused(features::ELASTIC_TRAINING)
            .acts_on("training loop")
            .may_change(),
            Key::integer(
                "elastic_timeout_seconds",
                300,
                "Seconds to wait for enough slices before an attempt to continue counts as failed.",
            )
            .at_least(0.0)
            .refused(features::ELASTIC_TRAINING)
            .only_with("elastic_enabled", &[])
            .acts_on("training loop")
            .may_change(),
            Key::integer(
                "elastic_max_retries",
                10,
                "Number of failures after which training is not resumed.",
            )
            .at_least(0.0)
            .refused(features::ELASTIC_TRAINING)
            .only_with("elastic_enabled", &[])
            .acts_on("training loop")
            .may_change(),
            Key::integer(
                "elastic_min_slice_count",
                -1,
                "Minimum number of slices to continue with; -1 or 0 waits for all.",
            )
            .at_least(-1.0)
            .neutral(&[Literal::Integer(0)])
            .refused(features::ELASTIC_TRAINING)
            .only_with("elastic_enabled", &[])
            .acts_on("training loop")
            .may_change(),
            Key::choice(
                "elastic_backup_kind",
                "snapshot",
                &["snapshot", "checkpoint"],
                "State from which training continues after a failure: a snapshot in memory or the last checkpoint.",
            )
            .refused(features::ELASTIC_TRAINING)
            .only_with("elastic_enabled", &[])
            .acts_on("training loop")
            .may_change(),
        ],
    },
    KeyGroup {
        name: "GcpMonitoring",
        title: "Google Cloud monitoring",
        prefix: None,
        keys: &[
            Key::boolean(
                "report_heartbeat_metric_for_gcp_monitoring",
                false,
                "Report to Google Cloud that the job is alive.",
            )
            .no_effect_here(
                "this program uses no monitoring service of Google; `metrics_file` holds each step's \
                 records",
            )
            .acts_on("monitoring")
            .run_level(),
            Key::integer(
                "heartbeat_reporting_interval_in_seconds",
                5,
                "Seconds between two heartbeats to Google Cloud.",
            )
            .no_effect_here("this program sends no heartbeats")
            .acts_on("monitoring")
            .run_level(),
            Key::boolean(
                "report_performance_metric_for_gcp_monitoring",
                false,
                "Report the speed of training to Google Cloud.",
            )
            .no_effect_here(
                "this program uses no monitoring service of Google; `metrics_file` holds each step's \
                 records",
            )
            .acts_on("monitoring")
            .run_level(),
        ],
    },
    KeyGroup {
        name: "Tensorboard",
        title: "TensorBoard",
        prefix: None,
        keys: &[
            Key::text(
                "vertex_tensorboard_project",
                "",
                "Google Cloud project whose Vertex AI holds the uploaded TensorBoard events.",
            )
            .or_none()
            .neutral(&[Literal::None])
            .no_effect_here("TensorBoard events are written to local files only")
            .acts_on("metrics")
            .run_level(),
            Key::text(
                "vertex_tensorboard_region",
                "",
                "Google Cloud region of the Vertex AI that holds the uploaded TensorBoard \
                 events.",
            )
            .or_none()
            .neutral(&[Literal::None])
            .no_effect_here("TensorBoard events are written to local files only")
            .acts_on("metrics")
            .run_level(),
        ],
    },
];
