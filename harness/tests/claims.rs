//! The figures of the documents are those of the published runs.

use std::{fs, path::Path};

use harness::claims;

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn every_published_figure_is_that_of_its_run() {
    let checked = claims::verify(&root()).unwrap();
    assert!(checked.wrong.is_empty(), "{}", checked.wrong.join("\n"));
    assert!(checked.figures >= 40, "{}", checked.figures);
}

#[test]
fn a_figure_changed_by_hand_is_found() {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("results"), dir.path().join("results")).unwrap();
    let wrong = |measured: &str, text: &str, printed: &str| {
        let run = "code-interpreter-ring3-2core-20261122";
        let readme = format!(
            "<!-- figures -->\n| a | {measured} | | `{run}` |\n<!-- /figures -->\n| b | 7 | | `{run}` |\n"
        );
        let claims = format!(
            "[[claims]]\nfile = \"README.md\"\ntext = \"{text}\"\nrun = \"{run}\"\n\
             values = [{{ printed = \"{printed}\", key = \"/phases/first_exec/p50_ms\" }}]\n"
        );
        fs::write(dir.path().join("README.md"), readme).unwrap();
        fs::write(dir.path().join("claims.toml"), claims).unwrap();
        claims::verify(dir.path()).unwrap().wrong.join("\n")
    };
    assert_eq!(wrong("2.3 ms", "2.3 ms", "2.3"), "");
    // In the document only: the listed text is gone, and the new figure is not listed.
    let in_document = wrong("1.9 ms", "2.3 ms", "2.3");
    assert!(in_document.contains("not in the document"), "{in_document}");
    let unlisted = "README.md: 1.9 in \"1.9 ms\" is not in claims.toml";
    assert!(in_document.contains(unlisted), "{in_document}");
    // In both: the run disagrees.
    let in_both = wrong("1.9 ms", "1.9 ms", "1.9");
    assert!(
        in_both.contains("1.9 is printed, 2.349817 was measured"),
        "{in_both}"
    );
    // A figure beside the listed one.
    let beside = wrong("2.3 / 3.3 ms", "2.3 / 3.3 ms", "2.3");
    assert!(
        beside.contains("3.3 in \"2.3 / 3.3 ms\" is not in"),
        "{beside}"
    );
}
