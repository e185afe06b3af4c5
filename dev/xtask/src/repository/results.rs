//! Published runs contain no path of the host on which they were recorded.

use std::path::{Path, PathBuf};

/// Parts of paths that only exist on the host of a run: home directories, and build outputs below a checkout.
const FOREIGN: [&str; 6] = [
    "\"/root/",
    "\"/home/",
    "\"/work/",
    "/target/cube/templates/",
    "/target/cube/guest/",
    " /tmp/",
];

fn published() -> Vec<PathBuf> {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../results");
    let runs = std::fs::read_dir(results).unwrap().flatten();
    let runs = runs.map(|run| run.path()).filter(|run| run.is_dir());
    runs.flat_map(|run| std::fs::read_dir(run).unwrap().flatten())
        .map(|file| file.path())
        .collect()
}

/// The parts of [`FOREIGN`] in a text. A quoted path counts only with its first quotation mark.
fn foreign(text: &str) -> Vec<&'static str> {
    let found = FOREIGN.into_iter().filter(|part| text.contains(part));
    found.collect()
}

#[test]
fn published_runs_contain_no_path_of_their_host() {
    let files = published();
    assert!(files.len() >= 40, "{}", files.len());
    let mut faults = Vec::new();
    for file in files {
        // Cells of scenarios may contain guest paths, so only the command line is searched in the events.
        let searched: String = match file.file_name().unwrap().to_str() {
            Some("events.jsonl.zst") => {
                let file = std::fs::File::open(&file).unwrap();
                let events = ruzstd::decoding::StreamingDecoder::new(file).unwrap();
                let text = std::io::read_to_string(events).unwrap();
                text.split("\"reproduce\":").nth(1).unwrap()[..200].into()
            }
            _ => std::fs::read_to_string(&file).unwrap(),
        };
        for part in foreign(&searched) {
            faults.push(format!("{}: {part:?}", file.display()));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(
        foreign("{\"dir\": \"/work/x/target/cube/templates/base\"}").len(),
        2
    );
}
