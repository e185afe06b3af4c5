//! Runs the clone hazard suite on real sandboxes: it must find no hazard, except those that are caused on purpose.

use testbed::{artifacts, exit::End};
use verify::{
    Setup,
    hazards::{self, HazardSpec, Mode, Templates},
    report::{Case, Report, Verdict},
};

/// Verifies the code interpreter's template.
fn report(mode: Mode) -> Report {
    verify("code-interpreter-v1", Templates::One { ask: None }, mode)
}

fn verify(template: &str, templates: Templates, mode: Mode) -> Report {
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
    let report = hazards::run(&spec).expect("`cargo xtask test` prepares everything");
    println!("{}", report.terminal());
    report
}

/// The verdict on a hazard between clones of a template.
fn verdict(report: &Report, template: &str, hazard: &str) -> Verdict {
    let class = format!("{template}.clones");
    let mut found = report.cases.iter().filter(|case| case.class == class);
    let found = found.find(|case| case.name == hazard);
    found
        .unwrap_or_else(|| panic!("{hazard} was not tried"))
        .verdict
}

fn check_no_hazard(report: &Report) {
    assert!(!matches!(report.end(), End::Breach | End::Inconclusive));
    for case in &report.cases {
        match case.name.as_str() {
            // A busy host corrects the clocks of clones late. They must at least not keep the template's time.
            "wall-clock" => assert!(offset_ms(case).abs() < 30_000.0, "{case:?}"),
            _ => assert_ne!(case.verdict, Verdict::Fail, "{case:?}"),
        }
    }
}

#[test]
fn interpreter_clones_and_forks_have_no_hazard() {
    let report = report(Mode::Look);
    check_no_hazard(&report);
    // These are judged less strictly in other people's templates.
    for hazard in [
        "python-random",
        "javascript-math-random",
        "bash-random",
        "leftovers-of-the-build",
    ] {
        let verdict = verdict(&report, "code-interpreter-v1", hazard);
        assert_eq!(verdict, Verdict::Pass, "{hazard}");
    }
}

#[test]
fn kvm_built_templates_have_no_hazard_but_the_state_of_their_start_command() {
    let report = verify("base", Templates::Built, Mode::Look);
    check_no_hazard(&report);
    let result = |kind: &str, hazard| verdict(&report, &format!("clone-hazards-{kind}"), hazard);
    for of in ["from-template", "from-image"] {
        assert_eq!(result(of, "memory-of-processes"), Verdict::Absent);
        assert_eq!(result(of, "python-random"), Verdict::Absent);
        for hazard in [
            "getrandom",
            "canaries-of-new-processes",
            "leftovers-of-the-build",
        ] {
            assert_eq!(result(of, hazard), Verdict::Pass, "{hazard}");
        }
    }
    // The generator of the running program was seeded before the snapshot.
    for hazard in ["memory-of-processes", "answers-of-the-start-command"] {
        let found = result("start-command", hazard);
        assert_eq!(found, Verdict::Warned, "{hazard}");
    }
}

/// Offset in the evidence such as `+1.5 ms, ±0.5 ms`.
fn offset_ms(case: &Case) -> f64 {
    let number = case.evidence["clock"].split(' ').next();
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no clock was read: {case:?}"))
}

#[test]
fn interpreter_every_clone_hazard_that_is_caused_is_found() {
    let report = report(Mode::Sabotage);
    assert_eq!(report.end(), End::Breach);
    // A resume corrects the clocks, so the hazards of the pause cannot be caused.
    let cases = report.cases.iter();
    for case in cases.filter(|case| !case.class.ends_with(".pause")) {
        let found = matches!(
            case.verdict,
            Verdict::Breach | Verdict::Fail | Verdict::Known | Verdict::Warned | Verdict::Absent
        );
        assert!(found, "{} was not found", case.name);
    }
}
