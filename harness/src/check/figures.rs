//! Compares the figures of a `report.json` with those computed from the events.

use serde_json::Value;

use super::CheckResult;
use crate::{
    pack::REPORT_FILE,
    report::document::{Document, FORMAT},
};

/// Differences that are listed; more are only counted.
const LISTED: usize = 5;
/// Values that depend on the variable CI or on the rules of grades, which versions of this program may change.
const IGNORED: [&str; 2] = ["exit_code", "decisive"];
/// Texts that are compared. Others may be worded differently by another version.
const TEXTS: [&str; 3] = ["ended", "record_sha256", "verdict"];

/// Adds a finding for each difference. Fields that only one side has are of another version of this program.
pub(super) fn compare(text: &[u8], recomputed: &Document, result: &mut CheckResult) {
    let Ok(reported) = serde_json::from_slice::<Value>(text) else {
        result.fault(format!("{REPORT_FILE} is not JSON"));
        return;
    };
    let format = &reported["format"];
    if *format != FORMAT {
        result.unproven(format!(
            "{REPORT_FILE} has format {format}, so its figures are not compared"
        ));
        return;
    }
    let recomputed = serde_json::to_value(recomputed).unwrap_or_default();
    let mut found = Differences::default();
    found.visit("", &reported, &recomputed);
    let Differences {
        compared,
        intervals,
        others,
    } = found;
    for different in others.iter().take(LISTED) {
        result.fault(format!("{REPORT_FILE}: {different}"));
    }
    if others.len() > LISTED {
        let more = others.len() - LISTED;
        result.fault(format!("{REPORT_FILE}: {more} more differences"));
    }
    if let Some(first) = intervals.first() {
        let n = intervals.len();
        result.unproven(format!(
            "{REPORT_FILE}: {n} bounds of intervals differ: {first}"
        ));
    }
    if others.is_empty() && intervals.is_empty() {
        result.fact(format!(
            "{compared} values of {REPORT_FILE} follow from the events"
        ));
    }
}

#[derive(Default)]
struct Differences {
    compared: usize,
    /// Intervals come from random draws, which another version of this program may choose differently.
    intervals: Vec<String>,
    others: Vec<String>,
}

impl Differences {
    fn visit(&mut self, path: &str, reported: &Value, recomputed: &Value) {
        let key = path.rsplit('.').next().unwrap_or_default();
        match (reported, recomputed) {
            _ if IGNORED.contains(&key) => {}
            (Value::Object(a), Value::Object(b)) => {
                for (key, value) in a {
                    if let Some(other) = b.get(key) {
                        self.visit(&format!("{path}.{key}"), value, other);
                    }
                }
            }
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
                for (n, (value, other)) in a.iter().zip(b).enumerate() {
                    self.visit(&format!("{path}.{n}"), value, other);
                }
            }
            (Value::String(_), Value::String(_)) if !TEXTS.contains(&key) => {}
            _ => {
                self.compared += 1;
                if !is_same(reported, recomputed) {
                    let list = if path.contains("ci95") || path.contains("interval95") {
                        &mut self.intervals
                    } else {
                        &mut self.others
                    };
                    let path = path.trim_start_matches('.');
                    list.push(format!(
                        "{path} is {reported}, the events give {recomputed}"
                    ));
                }
            }
        }
    }
}

fn is_same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        // The last digit depends on the order of additions.
        (Some(a), Some(b)) => (a - b).abs() <= 1e-9 * a.abs().max(b.abs()),
        _ => a == b,
    }
}
