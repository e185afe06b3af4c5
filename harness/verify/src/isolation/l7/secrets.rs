//! The class `secrets`: after real use, the secret exists only in the proxy and the server. As a control, the same
//! scan must find a text that was planted in each place.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{
    Scene,
    scan::{Forms, Hits, Needles, files_below},
};
use crate::{
    isolation::cases::Class,
    report::{Case, Verdict},
    sandbox::SandboxError,
};

/// Places of planted texts: indices of [`Needles::canaries`].
const IN_MEMORY: usize = 0;
const ON_DISK: usize = 1;
const IN_NOTE: usize = 2;
const IN_NAME: usize = 3;
const IN_ENVIRONMENT: usize = 4;

/// Searched places, in the order of the rows.
pub(super) const PLACES: [(&str, &str); 9] = [
    (
        "secrets-vmm-memory",
        "A dump of the memory of the VMM has the guest's memory and all buffers of its devices.",
    ),
    (
        "secrets-children-memory",
        "Processes that the server has started, other than VMMs and the proxy.",
    ),
    (
        "secrets-snapshot-memory",
        "The memory image of a snapshot of the running sandbox, made after the secret was used.",
    ),
    (
        "secrets-disk",
        "The disk layers of the sandbox and of its snapshot.",
    ),
    (
        "secrets-records",
        "Records, notes, the lists of refusals and calls, and the store of secrets, which is encrypted.",
    ),
    (
        "secrets-logs",
        "The logs of the server and of the proxy, at the level trace. Spans are in them: there are no other traces.",
    ),
    (
        "secrets-metrics",
        "All metrics. Their labels are a closed list, so nothing can be planted; the metric of ruled calls is found.",
    ),
    (
        "secrets-answers",
        "Answers of the API about the sandbox, its events, its log and its secrets.",
    ),
    (
        "secrets-processes",
        "Command line and environment of the server, of the proxy and of every VMM.",
    ),
];

/// Plants the texts that the guest must plant. Those in metadata, names and the environment already exist.
pub(super) fn plant(scene: &Scene) -> Result<(), SandboxError> {
    let canaries = &scene.needles.canaries;
    let agent = || scene.sandbox.agent();
    let failed =
        |error: &dyn std::error::Error| crate::sandbox::failed("plant a text", model::chain(error));
    let write = |path, text: &String| {
        let written = agent()?.write_file(path, text.as_bytes(), Some("root"));
        written.map_err(|error| failed(&error))
    };
    write("/dev/shm/planted", &canaries[IN_MEMORY])?;
    write("/root/planted", &canaries[ON_DISK])?;
    scene.sh("sync")?;
    // The log contains routes that do not exist.
    let route = format!("/{}", canaries[IN_NAME]);
    let answer = scene.account.request("GET", &route, None)?;
    crate::sandbox::expect("ask for a route that does not exist", &answer, &[404])
}

/// Result of a search.
struct Search {
    hits: Hits,
    /// Occurrences of the planted text. `None`: nothing could be planted, because there is nothing to search.
    planted: Option<u64>,
    note: String,
}

/// Searches all places.
pub(super) fn search(scene: &Scene) -> Result<Vec<Case>, SandboxError> {
    let needles = &scene.needles;
    let processes = scene.processes();
    let mut found = Vec::new();
    let memory_of = |is_wanted: &dyn Fn(&str) -> bool| {
        let (mut hits, mut count) = (Hits::default(), 0);
        for process in processes
            .iter()
            .filter(|process| is_wanted(&process.program))
        {
            // A process that has ended in the meantime has no memory.
            if needles.count_memory(process.pid, &mut hits).is_ok() {
                count += 1;
            }
        }
        (hits, count)
    };
    let (hits, count) = memory_of(&|program| program == "cube-vmm");
    found.push(Search {
        hits,
        planted: Some(hits.canaries[IN_MEMORY]),
        note: format!("{count} processes"),
    });
    let (hits, count) = memory_of(&|name| !["cube-vmm", "cube-egress", "cube-api"].contains(&name));
    let (proxy, _) = memory_of(&|program| program == "cube-egress");
    let (server, _) = memory_of(&|program| program == "cube-api");
    found.push(Search {
        hits,
        planted: (count > 0).then_some(1),
        note: format!(
            "{count} processes; not judged: {} times in the proxy and {} times in the server, which hold it while a \
             request needs it",
            proxy.secret, server.secret
        ),
    });
    let answer = scene
        .sandbox
        .request("POST", "/snapshots", Some(&json!({})), &[201])?;
    let mut answers = answer.body;
    let [mut memory, mut disk, mut records] = [Hits::default(); 3];
    let mut files = 0;
    for path in files_below(&scene.server.state()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (forms, hits) = if name.starts_with("memory") {
            (Forms::Plain, &mut memory)
        } else if name.starts_with("layer") {
            (Forms::Plain, &mut disk)
        } else {
            (Forms::All, &mut records)
        };
        // A file removed in the meantime contains nothing.
        files += u32::from(needles.count_file(forms, &path, hits).is_ok());
    }
    let note = format!("{files} files below the state directory");
    for (hits, kind) in [(memory, IN_MEMORY), (disk, ON_DISK), (records, IN_NOTE)] {
        found.push(Search {
            hits,
            planted: Some(hits.canaries[kind]),
            note: note.clone(),
        });
    }
    found.push(logs(scene, needles));
    found.push(metrics(scene, needles)?);
    for path in ["", "/network/events", "/logs"] {
        answers.extend(scene.sandbox.request("GET", path, None, &[200])?.body);
    }
    for path in ["/secrets", "/secrets/l7"] {
        answers.extend(scene.request("GET", path)?);
    }
    let mut hits = Hits::default();
    needles.count(&answers, &mut hits);
    found.push(Search {
        hits,
        planted: Some(hits.canaries[IN_NOTE].min(hits.canaries[IN_NAME])),
        note: format!("{} bytes", answers.len()),
    });
    let mut hits = Hits::default();
    for process in &processes {
        for file in ["cmdline", "environ"] {
            let bytes = fs::read(format!("/proc/{}/{file}", process.pid));
            needles.count(&bytes.unwrap_or_default(), &mut hits);
        }
    }
    found.push(Search {
        hits,
        planted: Some(hits.canaries[IN_ENVIRONMENT]),
        note: format!("{} processes", processes.len()),
    });
    Ok(PLACES
        .iter()
        .zip(found)
        .map(|(place, search)| report(*place, &search))
        .collect())
}

fn logs(scene: &Scene, needles: &Needles) -> Search {
    let mut hits = Hits::default();
    let log = scene.server.log();
    // A file that cannot be read contains no planted text.
    let _ = needles.count_file(Forms::All, &log, &mut hits);
    Search {
        hits,
        planted: Some(hits.canaries[IN_NAME]),
        note: format!("{} bytes", length(&log)),
    }
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

fn metrics(scene: &Scene, needles: &Needles) -> Result<Search, SandboxError> {
    const RULED: &str = "cube_egress_calls_total{outcome=\"ruled\"}";
    let text = scene.request("GET", "/metrics")?;
    let mut hits = Hits::default();
    needles.count(&text, &mut hits);
    let text = String::from_utf8_lossy(&text);
    let mut values = text.lines().filter_map(|line| line.strip_prefix(RULED));
    Ok(Search {
        hits,
        planted: values.next().and_then(|value| value.trim().parse().ok()),
        note: format!("{} lines", text.lines().count()),
    })
}

fn report((name, why): (&str, &str), search: &Search) -> Case {
    let Search {
        hits,
        planted,
        note,
    } = search;
    let (verdict, problem) = match planted {
        _ if hits.secret + hits.other > 0 => (Verdict::Breach, Some("the secret was found")),
        Some(0) => (
            Verdict::Unproven,
            Some("the search does not find the planted text"),
        ),
        Some(_) | None => (Verdict::Pass, None),
    };
    let planted = planted.map_or_else(|| "nothing to plant in".to_owned(), |n| n.to_string());
    let found = format!(
        "the secret {} times, a part of it {}, the planted text {planted}; {note}",
        hits.secret, hits.other
    );
    let expected = "the secret 0 times, the planted text at least once".to_owned();
    let case = Case {
        expected,
        ..Case::new(Class::Secrets.name(), name, why)
    };
    case.with("found", found).judged(verdict, problem)
}

/// Create option with the text for notes.
pub(super) fn metadata(needles: &Needles) -> Value {
    json!({ "planted": needles.canaries[IN_NOTE] })
}

/// A host name that the policy refuses, so that it appears in records and logs.
pub(super) fn refused_name(needles: &Needles) -> String {
    format!("{}.example", needles.canaries[IN_NAME])
}

/// A file name in the environment of the server and of the proxy.
pub(super) fn authority_file(needles: &Needles) -> String {
    format!("{}.pem", needles.canaries[IN_ENVIRONMENT])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_passes_only_if_the_planted_text_is_found_and_the_secret_is_not() {
        let search = |secret, other, planted| Search {
            hits: Hits {
                secret,
                other,
                ..Hits::default()
            },
            planted,
            note: String::new(),
        };
        let verdict = |search: &Search| report(PLACES[0], search).verdict;
        assert_eq!(verdict(&search(0, 0, Some(1))), Verdict::Pass);
        assert_eq!(verdict(&search(0, 0, Some(0))), Verdict::Unproven);
        assert_eq!(verdict(&search(1, 0, Some(1))), Verdict::Breach);
        assert_eq!(verdict(&search(0, 1, Some(1))), Verdict::Breach);
    }
}
