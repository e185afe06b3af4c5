//! Limits of gates with a reference run in `results/` are computed from it, not chosen.

use std::path::Path;

use harness::{
    gate::derived,
    record,
    scenario::{self, Metric},
    session,
    summary::fold,
};

#[test]
fn limits_are_derived_from_their_accepted_runs() {
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
            let is_ratio = matches!(gate.metric, Metric::BaselineRatio(..));
            let Some(run) = &gate.accepted else {
                assert!(!is_ratio, "{}: {} has no run", scenario.name, gate.name);
                continue;
            };
            let run = root.join("results").join(run);
            let limit = derived::limit(gate, &fold::fold(&record::read(&run).unwrap()));
            let class = session::read_environment(&run).unwrap().class();
            if limit != Some(gate.limit) || gate.host.as_ref().is_some_and(|host| *host != class) {
                wrong.push(format!(
                    "{}: {} is {:?}, {} on {class:?} gives {limit:?}",
                    scenario.name,
                    gate.metric,
                    gate.limit,
                    run.display()
                ));
            }
            checked += 1;
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked >= 7, "{checked}");
}
