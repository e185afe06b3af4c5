//! Runs the clone hazard suite on real sandboxes: it must find no hazard, except those that are caused on purpose.

use testbed::{artifacts, exit::End};
use verify::{
    Setup,
    hazards::{
        self, Between, Finding, Findings, HazardResult, HazardSpec, Mode, OfTemplate, Templates,
        report,
    },
};

/// Verifies the code interpreter's template.
fn findings(mode: Mode) -> Findings {
    verify("code-interpreter-v1", Templates::One { ask: None }, mode)
}

fn verify(template: &str, templates: Templates, mode: Mode) -> Findings {
    // Each test has its own directory, because both may run in one process. Socket paths below it must be short.
    let root = tempfile::Builder::new().prefix("hz").tempdir_in("/tmp");
    let root = root.expect("a directory");
    let spec = HazardSpec {
        setup: Setup {
            artifacts: artifacts::default_dir(),
            vmm: None,
            api: None,
            run_root: root.path().to_owned(),
            template: template.to_owned(),
        },
        target: None,
        templates,
        mode,
    };
    // Artifacts and programs are found through CUBE_ARTIFACTS and CUBE_BIN. The error names what is missing.
    let findings = hazards::run(&spec).expect("`cargo xtask test` prepares everything");
    println!("{}", report::terminal(&findings));
    findings
}

/// The result of a hazard between clones.
fn result(of: &OfTemplate, hazard: &str) -> HazardResult {
    let mut found = of.findings.iter().filter(|f| f.between == Between::Clones);
    let found = found.find(|f| f.hazard == hazard);
    found
        .unwrap_or_else(|| panic!("{hazard} was not tried"))
        .result
}

fn check_no_hazard(findings: &Findings) {
    assert!(!matches!(findings.end(), End::Breach | End::Inconclusive));
    for finding in findings.all() {
        match finding.hazard.as_str() {
            // A busy host corrects the clocks of clones late. They must at least not keep the template's time.
            "wall-clock" => assert!(offset_ms(finding).abs() < 30_000.0, "{finding:?}"),
            _ => assert_ne!(finding.result, HazardResult::Fail, "{finding:?}"),
        }
    }
}

#[test]
fn interpreter_clones_and_forks_have_no_hazard() {
    let findings = findings(Mode::Look);
    check_no_hazard(&findings);
    let [of] = &findings.templates[..] else {
        panic!("{findings:?}");
    };
    // These are judged less strictly in other people's templates.
    for hazard in [
        "python-random",
        "javascript-math-random",
        "bash-random",
        "leftovers-of-the-build",
    ] {
        assert_eq!(result(of, hazard), HazardResult::Pass, "{hazard}");
    }
}

#[test]
fn kvm_built_templates_have_no_hazard_but_the_state_of_their_start_command() {
    let findings = verify("base", Templates::Built, Mode::Look);
    check_no_hazard(&findings);
    let [of_template, of_image, with_start_command] = &findings.templates[..] else {
        panic!("{findings:?}");
    };
    for of in [of_template, of_image] {
        assert_eq!(result(of, "memory-of-processes"), HazardResult::Absent);
        assert_eq!(result(of, "python-random"), HazardResult::Absent);
        for hazard in [
            "getrandom",
            "canaries-of-new-processes",
            "leftovers-of-the-build",
        ] {
            assert_eq!(result(of, hazard), HazardResult::Pass, "{hazard}");
        }
    }
    // The generator of the running program was seeded before the snapshot.
    for hazard in ["memory-of-processes", "answers-of-the-start-command"] {
        let found = result(with_start_command, hazard);
        assert_eq!(found, HazardResult::Warned, "{hazard}");
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
    assert_eq!(findings.end(), End::Breach);
    // A resume corrects the clocks, so the hazards of the pause cannot be caused.
    let broken = findings.all().filter(|f| f.between != Between::Pause);
    for finding in broken {
        let found = matches!(
            finding.result,
            HazardResult::Fail | HazardResult::Known | HazardResult::Warned | HazardResult::Absent
        );
        assert!(found, "{} was not found", finding.hazard);
    }
}
