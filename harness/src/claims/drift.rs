//! Compares the confidence intervals of a repeated run with those of the published run.

use std::{collections::BTreeSet, path::Path};

use serde_json::Value;

use super::{Claim, ClaimsError, load, report};

/// Keys of values in reports, and of the intervals next to them.
const INTERVALS: [(&str, &str); 5] = [
    ("p50_ms", "p50_ci95_ms"),
    ("p95_ms", "p95_ci95_ms"),
    ("p99_ms", "p99_ci95_ms"),
    ("ratio", "ratio_ci95"),
    ("slope_bytes_per_clone", "slope_ci95"),
];

/// A published run and the directory of its repetition.
#[derive(Clone, Copy, Debug)]
pub struct Rerun<'a> {
    /// Root of the repository.
    pub root: &'a Path,
    /// Directory in `results/`.
    pub run: &'a str,
    pub again: &'a Path,
}

/// Result of repeating one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drift {
    /// Figures whose intervals overlap.
    pub agree: usize,
    /// One sentence for each figure whose intervals do not overlap.
    pub drifted: Vec<String>,
    /// One sentence for each figure that has no interval in one of the runs, or is from another host.
    pub undecided: Vec<String>,
}

/// The runs that claims quote.
///
/// # Errors
/// Returns [`ClaimsError`] if the list cannot be read.
pub fn runs(root: &Path) -> Result<BTreeSet<String>, ClaimsError> {
    let claims = load(root)?.claims;
    Ok(claims.into_iter().map(|claim| claim.run).collect())
}

/// Compares the figures of a run with those of a later run of the same scenario.
///
/// # Errors
/// Returns [`ClaimsError`] if the list or one of the runs cannot be read.
pub fn drift(of: Rerun<'_>) -> Result<Drift, ClaimsError> {
    let published = report(&of.root.join("results").join(of.run))?;
    let again = report(of.again)?;
    let claims = load(of.root)?.claims;
    let quoting: Vec<Claim> = claims
        .into_iter()
        .filter(|claim| claim.run == of.run)
        .collect();
    Ok(compare(&quoting, &published, &again))
}

fn compare(claims: &[Claim], published: &Value, again: &Value) -> Drift {
    let mut drift = Drift::default();
    let host = |report: &Value| {
        let of = |key| report.pointer(key).cloned();
        (of("/host/cpu_model"), of("/host/kernel"))
    };
    let same_host = host(published) == host(again);
    for claim in claims {
        for key in claim.values.iter().map(|figure| figure.key.as_str()) {
            let Some(pointer) = interval_of(key) else {
                continue;
            };
            let name = format!("{}: {:?}: {key}", claim.place(), claim.text);
            let is_ratio = key.ends_with("/ratio");
            let both = interval(published, &pointer).zip(interval(again, &pointer));
            match both {
                Some(_) if !same_host && !is_ratio => {
                    drift
                        .undecided
                        .push(format!("{name}: measured on another host"));
                }
                None => drift
                    .undecided
                    .push(format!("{name}: a run has no interval")),
                Some((old, new)) if old[0] <= new[1] && new[0] <= old[1] => drift.agree += 1,
                Some((old, new)) => drift.drifted.push(format!(
                    "{name}: published {:.4} to {:.4}, measured again {:.4} to {:.4}",
                    old[0], old[1], new[0], new[1]
                )),
            }
        }
    }
    drift
}

/// Pointer to the interval of the value at `key`.
fn interval_of(key: &str) -> Option<String> {
    let (above, last) = key.rsplit_once('/')?;
    let (_, interval) = INTERVALS.iter().find(|(value, _)| *value == last)?;
    Some(format!("{above}/{interval}"))
}

fn interval(report: &Value, pointer: &str) -> Option<[f64; 2]> {
    let ends = report.pointer(pointer)?;
    Some([ends.get(0)?.as_f64()?, ends.get(1)?.as_f64()?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn claims() -> Vec<Claim> {
        let text = "[[claims]]\nfiles = [\"R\"]\ntext = \"2 ms\"\nrun = \"r\"\n\
                    values = [{ printed = \"2\", key = \"/a/p50_ms\" }]\n";
        toml::from_str::<super::super::Claims>(text).unwrap().claims
    }

    fn measured(cpu: &str, interval: Value) -> Value {
        json!({ "host": { "cpu_model": cpu, "kernel": "k" }, "a": { "p50_ms": 2.0, "p50_ci95_ms": interval } })
    }

    #[test]
    fn intervals_that_meet_agree_and_others_have_drifted() {
        let old = measured("c", json!([1.9, 2.2]));
        let found = |again: &Value| compare(&claims(), &old, again);
        assert_eq!(found(&measured("c", json!([2.1, 2.5]))).agree, 1);
        let drifted = found(&measured("c", json!([2.3, 2.5])));
        assert!(
            drifted.drifted[0].contains("measured again 2.3000"),
            "{drifted:?}"
        );
        assert_eq!(found(&measured("d", json!([2.1, 2.5]))).undecided.len(), 1);
        assert_eq!(found(&measured("c", Value::Null)).undecided.len(), 1);
    }
}
