//! Logs of sandboxes: life-cycle events, refused packets, and the end of the console.
//!
//! Console lines have no timestamps. They are listed with the time at which the current VM started.

use std::{collections::BTreeMap, io::SeekFrom, path::Path};

use axum::{extract::State, routing::MethodFilter};
use envd::Timestamp;
use netisolation::NetEvent;
use rest::{LogEntry, LogLevel, LogLine, SandboxLogs, SandboxLogsV2};
use tokio::io::{AsyncReadExt, AsyncSeekExt};

use super::{
    app::App,
    body::OfSandbox,
    endpoint::{Access, Endpoint},
    error::ApiError,
    events,
    query::Query,
    spread::Spread,
};
use crate::{auth::Scope, json::Json, registry::History};

const READ: Access = Access::Key(Scope::SandboxesRead);
/// Maximum number of bytes that are read from the end of a console file.
const MAX_CONSOLE: u64 = 256 * 1024;
/// Maximum number of entries in one response.
const MAX_LINES: usize = 1000;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    vec![
        Spread::BySandbox.at(get, "/sandboxes/{id}/logs", READ, old),
        Spread::BySandbox.at(get, "/v2/sandboxes/{id}/logs", READ, new),
    ]
}

async fn old(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    query: Query,
) -> Result<Json<SandboxLogs>, ApiError> {
    let history = app.registry.history(&id).await?;
    let refused = app.refused(&id).await;
    let from_ms = query.number("start")?.unwrap_or(0);
    let mut entries = entries(&history, &refused).await;
    entries.retain(|entry| entry.timestamp.unix_ns() / 1_000_000 >= from_ms);
    entries.truncate(limit(&query)?);
    let logs = entries.iter().map(line).collect();
    Ok(Json(SandboxLogs {
        logs,
        log_entries: entries,
    }))
}

async fn new(
    State(app): State<App>,
    OfSandbox(id): OfSandbox,
    query: Query,
) -> Result<Json<SandboxLogsV2>, ApiError> {
    let history = app.registry.history(&id).await?;
    let cursor_ms: Option<u64> = query.number("cursor")?;
    let is_backward = match query.get("direction") {
        None | Some("forward") => false,
        Some("backward") => true,
        Some(other) => {
            let wrong = format!("direction is {other:?}: use forward or backward");
            return Err(ApiError::BadRequest(wrong));
        }
    };
    let search = query.get("search").unwrap_or_default();
    let level = query.level()?;
    let mut logs = entries(&history, &app.refused(&id).await).await;
    logs.retain(|entry| {
        let at_ms = entry.timestamp.unix_ns() / 1_000_000;
        let in_range = match (cursor_ms, is_backward) {
            (None, _) => true,
            (Some(cursor), false) => at_ms >= cursor,
            (Some(cursor), true) => at_ms <= cursor,
        };
        let is_of_level = level.is_none_or(|least| entry.level >= least);
        in_range && is_of_level && entry.message.contains(search)
    });
    if is_backward {
        logs.reverse();
    }
    logs.truncate(limit(&query)?);
    Ok(Json(SandboxLogsV2 { logs }))
}

fn limit(query: &Query) -> Result<usize, ApiError> {
    Ok(query.number("limit")?.unwrap_or(MAX_LINES).min(MAX_LINES))
}

/// All entries, oldest first.
async fn entries(history: &History, refused: &[NetEvent]) -> Vec<LogEntry> {
    let sandbox = &history.view.sandbox;
    let text = console_end(&sandbox.console).await.unwrap_or_default();
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let console = lines.map(|line| entry(sandbox.vm_since, "console", line));
    let lived = history.events.iter();
    let lived = lived.map(|event| entry(event.at, "lifecycle", &event.what));
    let refused = refused.iter().map(events::log_entry);
    let mut all: Vec<_> = lived.chain(console).chain(refused).collect();
    all.sort_by_key(|entry| entry.timestamp);
    all
}

fn entry(at_ms: u64, logger: &str, message: &str) -> LogEntry {
    LogEntry {
        timestamp: Timestamp::from_unix_ms(at_ms),
        message: message.to_owned(),
        level: LogLevel::Info,
        fields: BTreeMap::from([("logger".to_owned(), logger.to_owned())]),
    }
}

/// The entry in the format for older clients.
fn line(entry: &LogEntry) -> LogLine {
    let line = serde_json::json!({
        "level": entry.level,
        "logger": entry.fields.get("logger"),
        "message": entry.message,
        "timestamp": entry.timestamp,
    });
    LogLine {
        timestamp: entry.timestamp,
        line: line.to_string(),
    }
}

/// Reads the last [`MAX_CONSOLE`] bytes of a console file. The guest controls the contents, so invalid UTF-8 is
/// replaced.
async fn console_end(path: &Path) -> std::io::Result<String> {
    let mut file = tokio::fs::File::open(path).await?;
    let length = file.metadata().await?.len();
    let start = length.saturating_sub(MAX_CONSOLE);
    file.seek(SeekFrom::Start(start)).await?;
    let mut bytes = Vec::new();
    file.take(MAX_CONSOLE).read_to_end(&mut bytes).await?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_end_of_a_console_is_read_and_converted_to_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let mut bytes = vec![b'a'; 300 * 1024];
        bytes.extend(b"\nlast \xff line\n");
        std::fs::write(&path, bytes).unwrap();
        let text = console_end(&path).await.unwrap();
        assert_eq!(text.lines().last(), Some("last \u{fffd} line"));
        assert!(text.len() < 260 * 1024 + 16);
    }

    #[test]
    fn log_lines_have_the_format_of_older_clients() {
        let line = line(&entry(1_700_000_000_000, "console", "hello \"you\""));
        let parsed: serde_json::Value = serde_json::from_str(&line.line).unwrap();
        assert_eq!(parsed["message"], "hello \"you\"");
        assert_eq!(
            (&parsed["level"], &parsed["logger"]),
            (&"info".into(), &"console".into())
        );
    }
}
