//! `cube sandbox logs` and `metrics`.

use clap::Args;
use envd::guest_text;
use model::Bytes;
use rest::{LogLevel, SandboxLogs, SandboxMetric};

use crate::{
    context::Context,
    failure::Failure,
    output::{print, time},
    server::{segment, unknown_sandbox},
};

#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Show only the last entries
    #[arg(long, value_name = "N")]
    tail: Option<usize>,
}

const COLUMNS: [&str; 5] = ["TIME", "CPUS", "CPU", "MEMORY", "DISK"];

pub(super) fn logs(context: &Context, args: &LogsArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/logs", segment(&args.id));
    let found: SandboxLogs = context.server()?.get(&path).map_err(unknown_sandbox)?;
    let entries = found.log_entries;
    let first = args
        .tail
        .map_or(0, |tail| entries.len().saturating_sub(tail));
    let entries = entries.get(first..).unwrap_or_default();
    if context.format == crate::output::Format::Json {
        return context.format.list("log", entries, &[], |_| Vec::new());
    }
    let lines: String = entries
        .iter()
        .map(|entry| {
            let (at, level) = (time(Some(entry.timestamp)), name(entry.level));
            format!("{at}  {level:<5}  {}\n", guest_text(&entry.message))
        })
        .collect();
    print(&lines)
}

pub(crate) fn name(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    }
}

pub(super) fn metrics(context: &Context, id: &str) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/metrics", segment(id));
    let found: Vec<SandboxMetric> = context.server()?.get(&path).map_err(unknown_sandbox)?;
    context.format.list("metric", &found, &COLUMNS, |metric| {
        vec![
            time(Some(metric.timestamp)),
            metric.cpu_count.to_string(),
            format!("{:.1} %", metric.cpu_used_pct),
            format!(
                "{} of {}",
                Bytes(metric.mem_used).rounded(),
                Bytes(metric.mem_total).rounded()
            ),
            format!(
                "{} of {}",
                Bytes(metric.disk_used).rounded(),
                Bytes(metric.disk_total).rounded()
            ),
        ]
    })
}
