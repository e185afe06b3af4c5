//! Limits of ratios are computed from reference runs in `results/`, not chosen.

use std::path::Path;

use harness::{
    record,
    scenario::{self, Limit, Metric},
    summary::{fold, ratio},
};

#[test]
fn ratio_limits_are_derived_from_their_accepted_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for entry in std::fs::read_dir(root.join("scenarios")).unwrap() {
        let path = entry.unwrap().path();
        let is_scenario = path.extension().is_some_and(|e| e == "toml");
        if !is_scenario || path.ends_with("defaults.toml") {
            continue;
        }
        let scenario = scenario::load(&path, None).unwrap();
        for gate in &scenario.gates {
            let Metric::BaselineRatio(of, quantile) = gate.metric else {
                continue;
            };
            let run = gate.accepted.as_ref();
            let run = run.unwrap_or_else(|| panic!("{}: {} has no run", scenario.name, gate.name));
            let events = record::read(&root.join("results").join(run)).unwrap();
            let accepted = ratio::over_baseline(&fold::fold(&events), of, quantile);
            let limit = ratio::limit_from(&accepted);
            if limit.map(Limit::Times) != Some(gate.limit) {
                wrong.push(format!(
                    "{}: {} is {:?}, {run} gives {limit:?} ({accepted:?})",
                    scenario.name, gate.metric, gate.limit
                ));
            }
            checked += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked >= 7, "{checked}");
}
