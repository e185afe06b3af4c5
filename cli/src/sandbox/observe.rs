//! `cube sandbox logs` and `metrics`.

use std::{thread, time::Duration};

use clap::Args;
use envd::guest_text;
use model::Bytes;
use rest::{LogEntry, LogLevel, SandboxLogs, SandboxMetric};

use crate::{
    context::Context,
    failure::{Failure, Kind},
    output::{Format, print, time},
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
    /// Continue to print new ones until the sandbox ends
    #[arg(short, long)]
    follow: bool,
}

#[derive(Args, Debug)]
pub(crate) struct MetricsArgs {
    /// Id of the sandbox
    #[arg(value_name = "ID")]
    id: String,
    /// Show all samples since the start, oldest first, instead of the last one
    #[arg(long)]
    all: bool,
}

/// Pause between two requests of `--follow`.
const POLL: Duration = Duration::from_secs(1);
const COLUMNS: [&str; 5] = ["TIME", "CPUS", "CPU", "MEMORY", "DISK"];

pub(super) fn logs(context: &Context, args: &LogsArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/logs", segment(&args.id));
    let mut server = context.server()?;
    let found: SandboxLogs = server.get(&path).map_err(unknown_sandbox)?;
    let entries = found.log_entries;
    let first = args
        .tail
        .map_or(0, |tail| entries.len().saturating_sub(tail));
    show(context, entries.get(first..).unwrap_or_default())?;
    if !args.follow {
        return Ok(());
    }
    let list = || {
        server
            .get(&path)
            .map(|found: SandboxLogs| found.log_entries)
    };
    follow(entries, list, |new| show(context, new))
}

/// Shows what is new in the list each second, until the sandbox ends. The server keeps a bounded number of entries, without
/// ids.
pub(super) fn follow<T: Clone + PartialEq>(
    mut seen: Vec<T>,
    mut list: impl FnMut() -> Result<Vec<T>, Failure>,
    show: impl Fn(&[T]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    loop {
        thread::sleep(POLL);
        let found = match list() {
            Err(why) if why.kind == Kind::NotFound => return Ok(()),
            found => found?,
        };
        let new = found.iter().filter(|entry| !seen.contains(entry));
        let new: Vec<_> = new.cloned().collect();
        if !new.is_empty() {
            show(&new)?;
        }
        seen = found;
    }
}

fn show(context: &Context, entries: &[LogEntry]) -> Result<(), Failure> {
    if context.format == Format::Json {
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

pub(super) fn metrics(context: &Context, args: &MetricsArgs) -> Result<(), Failure> {
    let path = format!("/sandboxes/{}/metrics", segment(&args.id));
    let found: Vec<SandboxMetric> = context.server()?.get(&path).map_err(unknown_sandbox)?;
    let first = if args.all {
        0
    } else {
        found.len().saturating_sub(1)
    };
    let shown = found.get(first..).unwrap_or_default();
    context.format.list("metric", shown, &COLUMNS, |metric| {
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
