//! Traces: request sequences as JSON files in the format of CubeSandbox's cube-bench (`--dump-trace`), so that
//! either program can replay a sequence.

use std::{fs, io, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    plan::{Plan, Row, Start, Subject},
    scenario::{Arrival, Scenario},
};

/// Maximum number of requests in a trace. A longer one is treated as a mistake.
const MOST_REQUESTS: usize = 100_000;
/// Maximum size of a file in bytes.
const MOST_BYTES: u64 = 64 << 20;
/// Latest arrival and longest lifetime, in milliseconds: a week.
const LATEST_MS: u64 = 7 * 24 * 3600 * 1000;

/// The file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceFile {
    #[serde(default)]
    pub workload: String,
    #[serde(default)]
    pub seed: i64,
    #[serde(default)]
    pub generated_at: String,
    #[serde(default)]
    pub params: Params,
    #[serde(default)]
    pub templates: Vec<TraceTemplate>,
    pub requests: Vec<TraceRequest>,
}

/// Parameters that generated the sequence; informative only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Params {
    pub rate_per_sec: f64,
    pub lifetime_min_s: f64,
    pub lifetime_max_s: f64,
    pub total: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceTemplate {
    pub template_id: String,
    #[serde(default)]
    pub weight: u32,
    /// Informative only; 0 if unknown.
    #[serde(default)]
    pub cpu_millis: u64,
    #[serde(default)]
    pub mem_mib: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    pub seq: u64,
    pub arrival_ms: u64,
    #[serde(default)]
    pub template_id: String,
    #[serde(default)]
    pub cpu_millis: u64,
    #[serde(default)]
    pub mem_mib: u64,
    /// Time from the response to the create until the sandbox is killed; 0 kills it after its first command.
    #[serde(default)]
    pub lifetime_ms: u64,
}

/// A validated trace, in the order of `seq`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// Distinct templates, in the order in which the file lists or uses them.
    pub templates: Vec<String>,
    pub requests: Vec<Request>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub arrival_ms: u64,
    /// Position in `templates`.
    pub template: u16,
    pub lifetime_ms: u64,
}

/// Reads and validates a trace. The error describes the first fault.
pub(crate) fn load(path: &Path) -> Result<Trace, String> {
    let named = |why: String| format!("trace {}: {why}", path.display());
    let file = fs::File::open(path).map_err(|e| named(e.to_string()))?;
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, MOST_BYTES + 1), &mut text)
        .map_err(|e| named(e.to_string()))?;
    if text.len() as u64 > MOST_BYTES {
        return Err(named(format!("it is larger than {MOST_BYTES} bytes")));
    }
    let file: TraceFile = serde_json::from_str(&text).map_err(|e| named(e.to_string()))?;
    check(file).map_err(named)
}

fn check(mut file: TraceFile) -> Result<Trace, String> {
    if file.requests.is_empty() || file.requests.len() > MOST_REQUESTS {
        return Err(format!(
            "it has {} requests, 1 to {MOST_REQUESTS} are allowed",
            file.requests.len()
        ));
    }
    file.requests.sort_by_key(|request| request.seq);
    let mut templates: Vec<String> = Vec::new();
    let mut position = |id: &str| {
        let at = templates.iter().position(|known| known == id);
        at.unwrap_or_else(|| {
            templates.push(id.to_owned());
            templates.len() - 1
        })
    };
    for template in &file.templates {
        position(&template.template_id);
    }
    let mut requests = Vec::new();
    let mut last_ms = 0;
    for request in &file.requests {
        let (seq, arrival_ms) = (request.seq, request.arrival_ms);
        if arrival_ms < last_ms {
            return Err(format!(
                "request {seq} arrives before the one in front of it"
            ));
        }
        if arrival_ms > LATEST_MS || request.lifetime_ms > LATEST_MS {
            return Err(format!(
                "request {seq} is later or lives longer than a week"
            ));
        }
        last_ms = arrival_ms;
        let template = u16::try_from(position(&request.template_id));
        requests.push(Request {
            arrival_ms,
            template: template.map_err(|_| "it has more than 65536 templates".to_owned())?,
            lifetime_ms: request.lifetime_ms,
        });
    }
    Ok(Trace {
        templates,
        requests,
    })
}

/// The first measured round of a plan as a trace; `None` if its arrivals have no times. `generated_at` is RFC 3339.
#[must_use]
pub fn of_plan(scenario: &Scenario, plan: &Plan, generated_at: String) -> Option<TraceFile> {
    let is_measured =
        |round: &&crate::plan::Round| round.row == Row::Measured && round.subject == Subject::Clone;
    let round = plan.rounds.iter().find(is_measured)?;
    let templates: Vec<TraceTemplate> = match scenario.templates() {
        [] => vec![named(&scenario.target.template, 1)],
        mix => mix
            .iter()
            .map(|of| named(&of.template, of.weight))
            .collect(),
    };
    let request = |(index, start): (usize, &Start)| {
        let Start::AtNs(ns) = start else { return None };
        let template = round.templates.get(index).copied().unwrap_or(0);
        let template = templates.get(usize::from(template))?;
        Some(TraceRequest {
            seq: index as u64,
            arrival_ms: ns / 1_000_000,
            template_id: template.template_id.clone(),
            cpu_millis: 0,
            mem_mib: 0,
            lifetime_ms: round.lifetimes_ms.get(index).copied().unwrap_or(0),
        })
    };
    let requests: Option<Vec<_>> = round.arrivals.iter().enumerate().map(request).collect();
    let lifetime = scenario.lifetime.unwrap_or_default();
    Some(TraceFile {
        workload: scenario.name.clone(),
        seed: i64::try_from(scenario.seed).unwrap_or(i64::MAX),
        generated_at,
        params: Params {
            rate_per_sec: match scenario.arrival {
                Arrival::Open { rate_per_s, .. } => rate_per_s,
                Arrival::Burst { .. } | Arrival::Closed { .. } => 0.0,
            },
            lifetime_min_s: lifetime.least.as_secs_f64(),
            lifetime_max_s: lifetime.most.as_secs_f64(),
            total: round.arrivals.len(),
        },
        requests: requests?,
        templates,
    })
}

fn named(template: &str, weight: u32) -> TraceTemplate {
    TraceTemplate {
        template_id: template.to_owned(),
        weight,
        cpu_millis: 0,
        mem_mib: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{plan, scenario};

    /// As CubeSandbox's cube-bench writes it.
    const THEIRS: &str = r#"{"workload":"mixed_spec","seed":42,"generated_at":"2026-11-24T00:00:00Z",
        "params":{"rate_per_sec":10,"lifetime_min_s":30,"lifetime_max_s":300,"total":3},
        "templates":[{"template_id":"small","weight":6,"cpu_millis":1000,"mem_mib":2048},
                     {"template_id":"large","weight":1,"cpu_millis":8000,"mem_mib":16384}],
        "requests":[{"seq":1,"arrival_ms":80,"template_id":"large","cpu_millis":8000,"mem_mib":16384,"lifetime_ms":31000},
                    {"seq":0,"arrival_ms":0,"template_id":"small","cpu_millis":1000,"mem_mib":2048,"lifetime_ms":53210},
                    {"seq":2,"arrival_ms":80,"template_id":"small","cpu_millis":1000,"mem_mib":2048,"lifetime_ms":0}]}"#;

    #[test]
    fn a_trace_of_the_other_program_is_replayed_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("trace.json");
        fs::write(&file, THEIRS).unwrap();
        let trace = load(&file).unwrap();
        assert_eq!(trace.templates, ["small", "large"]);
        let text = format!(
            "seed = 3\n[target]\nkind = 'e2b'\n[hold]\nuntil = 'lifetime'\n[mode]\nkind = 'trace'\nfile = '{}'",
            file.display()
        );
        let scenario = scenario::parse("t", &text).unwrap();
        let names: Vec<_> = scenario
            .templates()
            .iter()
            .map(|of| of.template.as_str())
            .collect();
        assert_eq!(names, ["small", "large"]);
        let plan = plan::build(&scenario);
        let round = plan
            .rounds
            .iter()
            .find(|r| r.subject == Subject::Clone)
            .unwrap();
        let ms = |ms: u64| Start::AtNs(ms * 1_000_000);
        assert_eq!(round.arrivals, [ms(0), ms(80), ms(80)]);
        assert_eq!(round.lifetimes_ms, [53_210, 31_000, 0]);
        assert_eq!(round.templates, [0, 1, 0]);
        // After a dump and a read, the trace is the same.
        let dumped = of_plan(&scenario, &plan, String::new()).unwrap();
        assert_eq!(check(dumped).unwrap(), trace);
        // Templates of another platform are replaced in the order of the file.
        let mapped = format!(
            "{text}\n[[mode.templates]]\ntemplate = 'base'\n[[mode.templates]]\ntemplate = 'big'"
        );
        let scenario = scenario::parse("t", &mapped).unwrap();
        assert_eq!(scenario.templates()[1].template, "big");
        let short = format!("{text}\n[[mode.templates]]\ntemplate = 'base'");
        let error = scenario::parse("t", &short).unwrap_err().to_string();
        assert!(error.contains("has 2 templates"), "{error}");
    }

    #[test]
    fn a_drawn_sequence_survives_a_dump() {
        let text = "[target]\nkind = 'e2b'\n[hold]\nuntil = 'lifetime'\nlifetime = '1s..3s'\n[arrival]\nkind = 'open'\n\
                    starts = 50\nrate_per_s = 20\n[mode]\nkind = 'mix'\n[[mode.templates]]\ntemplate = 'a'\nweight = 3\n[[mode.templates]]\ntemplate = 'b'";
        let scenario = scenario::parse("t", text).unwrap();
        let plan = plan::build(&scenario);
        let dumped = of_plan(&scenario, &plan, String::new()).unwrap();
        assert_eq!((dumped.params.total, dumped.templates[0].weight), (50, 3));
        let trace = check(dumped).unwrap();
        let round = plan.rounds.iter().find(|r| r.row == Row::Measured).unwrap();
        for (request, lifetime) in trace.requests.iter().zip(&round.lifetimes_ms) {
            assert_eq!(request.lifetime_ms, *lifetime);
        }
        let closed = scenario::parse("t", "[arrival]\nkind = 'closed'\nstarts = 3").unwrap();
        assert!(of_plan(&closed, &plan::build(&closed), String::new()).is_none());
    }

    #[test]
    fn malformed_traces_are_refused() {
        let refused = |from: &str, to: &str| {
            let text = THEIRS.replacen(from, to, 1);
            assert_ne!(text, THEIRS, "{from}");
            let file: Result<TraceFile, _> = serde_json::from_str(&text);
            file.map_err(|e| e.to_string()).and_then(check).unwrap_err()
        };
        assert!(
            refused("\"arrival_ms\":0", "\"arrival_ms\":99").contains("request 1 arrives before")
        );
        assert!(refused("53210", "999999999999").contains("longer than a week"));
        assert!(refused("53210", "-1").contains("invalid value"));
        assert!(
            load(Path::new("/no/such"))
                .unwrap_err()
                .contains("/no/such")
        );
        let none = TraceFile {
            requests: Vec::new(),
            ..serde_json::from_str(THEIRS).unwrap()
        };
        assert!(check(none).unwrap_err().contains("0 requests"));
    }
}
