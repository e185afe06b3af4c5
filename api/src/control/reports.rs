//! Reports of benchmark runs for the console: the subdirectories of `server.reports` that contain a `report.json`.
//!
//! The operator's directory is trusted, but names in requests are not: only names that the listing can contain are
//! opened.

use std::{
    cmp::Reverse,
    fs::{self, File},
    io::{self, Read},
    path::Path as FilePath,
    time::UNIX_EPOCH,
};

use axum::{
    extract::{Path, State},
    response::IntoResponse,
    routing::MethodFilter,
};
use envd::Timestamp;
use hyper::header::CONTENT_TYPE;
use rest::BenchmarkRun;

use super::{
    app::{App, on_thread},
    endpoint::{Access, Endpoint},
    error::ApiError,
    spread::Spread,
};
use crate::{auth::Scope, json::Json};

const FILE: &str = "report.json";
/// Maximum number of listed reports. The newest are listed.
const MOST: usize = 200;
/// Maximum size of a served report. The console does not load larger ones.
const MAX_BYTES: u64 = 32 << 20;
const MAX_NAME: usize = 128;

pub(super) fn endpoints() -> Vec<Endpoint> {
    let get = MethodFilter::GET;
    let access = Access::Key(Scope::MetricsRead);
    vec![
        Spread::Own.at(get, "/benchmarks", access, list),
        Spread::Own.at(get, "/benchmarks/{name}", access, report),
    ]
}

async fn list(State(app): State<App>) -> Result<Json<Vec<BenchmarkRun>>, ApiError> {
    let Some(dir) = app.reports.clone() else {
        return Ok(Json(Vec::new()));
    };
    let runs = on_thread(move || runs(&dir)).await?;
    runs.map(Json).map_err(ApiError::Reports)
}

async fn report(
    State(app): State<App>,
    Path(name): Path<String>,
) -> Result<impl IntoResponse, ApiError> {
    let missing = ApiError::NoReport(name.chars().take(MAX_NAME).collect());
    let Some(dir) = app.reports.clone().filter(|_| is_name(&name)) else {
        return Err(missing);
    };
    let found = on_thread(move || read(&dir.join(name).join(FILE))).await?;
    let text = found.map_err(ApiError::Reports)?.ok_or(missing)?;
    Ok(([(CONTENT_TYPE, "application/json")], text))
}

/// The runs in a directory, newest first.
fn runs(dir: &FilePath) -> io::Result<Vec<BenchmarkRun>> {
    let mut runs = Vec::new();
    for entry in fs::read_dir(dir)? {
        let Ok(name) = entry?.file_name().into_string() else {
            continue;
        };
        let report = fs::metadata(dir.join(&name).join(FILE));
        let Some(report) = report.ok().filter(|report| is_served(&name, report)) else {
            continue;
        };
        let modified = report.modified()?.duration_since(UNIX_EPOCH);
        let unix_ns = modified.unwrap_or_default().as_nanos();
        runs.push(BenchmarkRun {
            name,
            bytes: report.len(),
            modified_at: Timestamp::from_unix_ns(u64::try_from(unix_ns).unwrap_or(u64::MAX)),
        });
    }
    runs.sort_by(|a, b| (Reverse(a.modified_at), &a.name).cmp(&(Reverse(b.modified_at), &b.name)));
    runs.truncate(MOST);
    Ok(runs)
}

fn is_served(name: &str, report: &fs::Metadata) -> bool {
    is_name(name) && report.is_file() && report.len() <= MAX_BYTES
}

/// Whether a name is a single, non-hidden path component.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(is_plain)
}

/// `None` if there is no such report, or if it is too large.
fn read(path: &FilePath) -> io::Result<Option<Vec<u8>>> {
    match fs::metadata(path) {
        Ok(report) if report.is_file() => {}
        Ok(_) => return Ok(None),
        Err(why) if is_absence(&why) => return Ok(None),
        Err(why) => return Err(why),
    }
    let mut text = Vec::new();
    // It may have grown in the meantime.
    File::open(path)?
        .take(MAX_BYTES + 1)
        .read_to_end(&mut text)?;
    Ok((text.len() as u64 <= MAX_BYTES).then_some(text))
}

fn is_absence(why: &io::Error) -> bool {
    matches!(
        why.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_with_a_report_are_runs_and_nothing_else_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let put = |run: &str, file: &str| {
            fs::create_dir_all(dir.path().join(run)).unwrap();
            fs::write(dir.path().join(run).join(file), "{}").unwrap();
        };
        put("first", FILE);
        put("second-1.0", FILE);
        put("notes", "report.md");
        put(".hidden", FILE);
        put("a name", FILE);
        fs::write(dir.path().join("file"), "").unwrap();
        let large = File::create(dir.path().join("notes").join(FILE)).unwrap();
        large.set_len(MAX_BYTES + 1).unwrap();
        let mut names: Vec<_> = runs(dir.path()).unwrap();
        names.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<_> = names.iter().map(|run| (&*run.name, run.bytes)).collect();
        assert_eq!(names, [("first", 2), ("second-1.0", 2)]);
        let report = |name: &str| read(&dir.path().join(name).join(FILE)).unwrap();
        assert_eq!(report("first"), Some(b"{}".to_vec()));
        for none in ["notes", "none", "file"] {
            assert_eq!(report(none), None, "{none}");
        }
        for bad in ["", "..", ".hidden", "a/b", "a name", "ä", &"a".repeat(129)] {
            assert!(!is_name(bad), "{bad:?}");
        }
        assert!(runs(&dir.path().join("none")).is_err());
    }
}
