//! The suite of clone hazards on real sandboxes: it finds nothing, and it would.

use testbed::{artifacts, exit::End};
use verify::{
    conformance::Programs,
    hazards::{self, Between, Finding, Findings, HazardSpec, Mode, Verdict, report},
};

fn findings(mode: Mode) -> Findings {
    // Of its own: both tests run in one process. Sockets below it need a short path.
    let root = tempfile::Builder::new().prefix("hz").tempdir_in("/tmp");
    let root = root.expect("a directory");
    let spec = HazardSpec {
        programs: Programs {
            artifacts: artifacts::default_dir(),
            vmm: None,
            api: None,
        },
        target: None,
        sandbox_url: None,
        run_root: root.path().to_owned(),
        template: "code-interpreter-v1".to_owned(),
        mode,
    };
    // Tests find what was prepared through CUBE_ARTIFACTS and CUBE_BIN; the error names what is missing.
    hazards::run(&spec).expect("`cargo xtask test --tier interpreter` prepares everything")
}

#[test]
fn interpreter_clones_and_forks_share_nothing_they_must_not() {
    let findings = findings(Mode::Look);
    println!("{}", report::terminal(&findings));
    assert!(!matches!(findings.end(), End::Breach | End::Inconclusive));
    for finding in &findings.findings {
        match finding.hazard.as_str() {
            // A busy host tells clones the time late; they must not live in their template's past.
            "wall-clock" => assert!(offset_ms(finding).abs() < 30_000.0, "{finding:?}"),
            _ => assert_ne!(finding.verdict, Verdict::Fail, "{finding:?}"),
        }
    }
}

/// `+1.5 ms, ±0.5 ms`
fn offset_ms(finding: &Finding) -> f64 {
    let number = finding.evidence[0].split(' ').next();
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no clock was read: {finding:?}"))
}

#[test]
fn interpreter_every_clone_hazard_would_be_found() {
    let findings = findings(Mode::Sabotage);
    println!("{}", report::terminal(&findings));
    assert_eq!(findings.end(), End::Breach);
    // Waking up sets the clocks right again, whatever was done before.
    let broken = findings
        .findings
        .iter()
        .filter(|f| f.between != Between::Pause);
    for finding in broken {
        let found = matches!(
            finding.verdict,
            Verdict::Fail | Verdict::Known | Verdict::Absent
        );
        assert!(found, "{} was not found", finding.hazard);
    }
}
