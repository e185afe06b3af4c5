//! The clone hazard suite on real sandboxes: it finds no hazard, but it finds every hazard that is caused on purpose.

use testbed::{artifacts, exit::End};
use verify::{
    Setup,
    hazards::{self, Between, Finding, Findings, HazardResult, HazardSpec, Mode, report},
};

fn findings(mode: Mode) -> Findings {
    // Each test has its own directory, because both may run in one process. Socket paths below it must be short.
    let root = tempfile::Builder::new().prefix("hz").tempdir_in("/tmp");
    let root = root.expect("a directory");
    let spec = HazardSpec {
        setup: Setup {
            artifacts: artifacts::default_dir(),
            vmm: None,
            api: None,
            run_root: root.path().to_owned(),
            template: "code-interpreter-v1".to_owned(),
        },
        target: None,
        sandbox_url: None,
        mode,
    };
    // Artifacts and programs are found through CUBE_ARTIFACTS and CUBE_BIN. The error names what is missing.
    hazards::run(&spec).expect("`cargo xtask test --tier interpreter` prepares everything")
}

#[test]
fn interpreter_clones_and_forks_have_no_hazard() {
    let findings = findings(Mode::Look);
    println!("{}", report::terminal(&findings));
    assert!(!matches!(findings.end(), End::Breach | End::Inconclusive));
    for finding in &findings.findings {
        match finding.hazard.as_str() {
            // A busy host sets the clocks of clones late. They must at least not keep the time of the template.
            "wall-clock" => assert!(offset_ms(finding).abs() < 30_000.0, "{finding:?}"),
            _ => assert_ne!(finding.result, HazardResult::Fail, "{finding:?}"),
        }
    }
}

/// Offset in evidence such as `+1.5 ms, ±0.5 ms`.
fn offset_ms(finding: &Finding) -> f64 {
    let number = finding.evidence[0].split(' ').next();
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no clock was read: {finding:?}"))
}

#[test]
fn interpreter_every_clone_hazard_that_is_caused_is_found() {
    let findings = findings(Mode::Sabotage);
    println!("{}", report::terminal(&findings));
    assert_eq!(findings.end(), End::Breach);
    // A resume corrects the clocks, so the hazards of the pause cannot be caused.
    let broken = findings
        .findings
        .iter()
        .filter(|f| f.between != Between::Pause);
    for finding in broken {
        let found = matches!(
            finding.result,
            HazardResult::Fail | HazardResult::Known | HazardResult::Absent
        );
        assert!(found, "{} was not found", finding.hazard);
    }
}
