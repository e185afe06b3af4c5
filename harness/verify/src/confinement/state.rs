//! What /proc says of VMMs, without any attempt: it has to be the same however they were started.

use std::{collections::BTreeSet, fs, io, os::unix::fs::MetadataExt, path::Path};

use super::{
    Class, ConfinementError, Judged, Verdict, at, clone::Cloner, intruder::descriptors,
    scene::Scene, witness,
};

/// Clones that are looked at.
const CLONES: usize = 2;
/// The first id of the range that VMs have.
const FIRST_ID: u32 = 200_000;
/// Descriptors that a VMM may have at most.
const MAX_DESCRIPTORS: u64 = 8000;
/// The variable by which a VMM of the mutation run is told its layers. No released VMM may know it.
const WEAKENING: &str = "CUBE_VMM_LAYERS";
const NO_CAPABILITY: &str = "0000000000000000";

/// A question about one VMM: what is wrong with it, if anything.
type Question = fn(u32) -> io::Result<Option<String>>;

const QUESTIONS: [(&str, &str, Question); 9] = [
    (
        "state-user",
        "An own user and group, of no other process.",
        user,
    ),
    ("state-groups", "No further groups.", groups),
    (
        "state-capabilities",
        "No capability in any set, of any thread.",
        capabilities,
    ),
    (
        "state-no-new-privileges",
        "No program gives it more, of any thread.",
        no_new_privileges,
    ),
    (
        "state-filter",
        "A filter of system calls in every thread.",
        filter,
    ),
    (
        "state-dumpable",
        "Its /proc directory is root's.",
        not_dumpable,
    ),
    (
        "state-limits",
        "No core file; few descriptors; bounded files.",
        limits,
    ),
    (
        "state-environment",
        "Nothing in its environment.",
        environment,
    ),
    (
        "state-descriptors",
        "Nothing open but what the VM is made of.",
        open_files,
    ),
];
const UNIQUE: &str = "state-users-differ";
const PROGRAM: &str = "state-program";

/// Names of all cases.
pub(super) const NAMES: [&str; 11] = [
    "state-user",
    "state-groups",
    "state-capabilities",
    "state-no-new-privileges",
    "state-filter",
    "state-dumpable",
    "state-limits",
    "state-environment",
    "state-descriptors",
    UNIQUE,
    PROGRAM,
];

/// Of clones that the harness starts, and of the program itself.
pub(super) fn of_clones(scene: &Scene, cloner: &Cloner) -> Result<Vec<Judged>, ConfinementError> {
    let mut clones = vec![cloner.start(&scene.path(""))?];
    while clones.len() < CLONES {
        clones.push(cloner.start_paused(&scene.path(""))?);
    }
    let pids: Vec<u32> = clones.iter().map(|clone| clone.pid()).collect();
    let mut cases = of_processes("", &pids);
    let program = fs::read(&cloner.vmm).map_err(at(&cloner.vmm))?;
    let knows = program
        .windows(WEAKENING.len())
        .any(|part| part == WEAKENING.as_bytes());
    let wrong = knows.then(|| "it can be told to leave layers out".to_owned());
    cases.push(judged(
        "",
        PROGRAM,
        "A released VMM cannot be weakened.",
        wrong.into_iter().collect(),
    ));
    Ok(cases)
}

/// Of some processes; `prefix` tells their cases from others'.
pub(super) fn of_processes(prefix: &str, pids: &[u32]) -> Vec<Judged> {
    let mut cases = Vec::new();
    for (name, why, question) in QUESTIONS {
        let wrong = pids.iter().filter_map(|pid| match question(*pid) {
            Ok(None) => None,
            Ok(Some(what)) => Some(format!("process {pid}: {what}")),
            Err(error) => Some(format!("process {pid}: {error}")),
        });
        cases.push(judged(prefix, name, why, wrong.collect()));
    }
    let users: BTreeSet<_> = pids
        .iter()
        .map(|pid| witness::status(*pid, "Uid"))
        .collect();
    let shared = users.len() < pids.len();
    let wrong = shared.then(|| format!("{} VMs have {} users", pids.len(), users.len()));
    cases.push(judged(
        prefix,
        UNIQUE,
        "No VM shares its user with another.",
        wrong.into_iter().collect(),
    ));
    cases
}

fn judged(prefix: &str, name: &str, why: &str, wrong: Vec<String>) -> Judged {
    Judged {
        case: format!("{prefix}{name}"),
        class: Class::State,
        why: why.to_owned(),
        verdict: if wrong.is_empty() {
            Verdict::Pass
        } else {
            Verdict::Breach
        },
        expected: "as it should be".to_owned(),
        inside: String::new(),
        outside: wrong.join("; "),
    }
}

/// A line of the status of each thread.
fn of_threads(pid: u32, name: &str) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(entry?.path().join("status"))?;
        let value = witness::line(&text, name);
        found.insert(value.ok_or_else(|| io::Error::other(format!("no line {name}")))?);
    }
    Ok(found)
}

/// Wrong if a line of any thread is another than this.
fn differs(pid: u32, name: &str, wanted: &str) -> io::Result<Option<String>> {
    let found = of_threads(pid, name)?;
    let other = found.into_iter().find(|value| value != wanted);
    Ok(other.map(|value| format!("{name} is {value:?}")))
}

fn user(pid: u32) -> io::Result<Option<String>> {
    for name in ["Uid", "Gid"] {
        for ids in of_threads(pid, name)? {
            let mut all = ids.split(' ').map(|id| id.parse::<u32>().unwrap_or(0));
            let first = all.next().unwrap_or(0);
            if first < FIRST_ID || all.any(|id| id != first) {
                return Ok(Some(format!("{name} is {ids}")));
            }
        }
    }
    Ok(None)
}

fn groups(pid: u32) -> io::Result<Option<String>> {
    differs(pid, "Groups", "")
}

fn capabilities(pid: u32) -> io::Result<Option<String>> {
    for set in ["CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"] {
        if let Some(wrong) = differs(pid, set, NO_CAPABILITY)? {
            return Ok(Some(wrong));
        }
    }
    Ok(None)
}

fn no_new_privileges(pid: u32) -> io::Result<Option<String>> {
    differs(pid, "NoNewPrivs", "1")
}

fn filter(pid: u32) -> io::Result<Option<String>> {
    differs(pid, "Seccomp", "2")
}

/// The kernel gives /proc/PID of a process that is not dumpable to root (proc(5)).
fn not_dumpable(pid: u32) -> io::Result<Option<String>> {
    let owner = fs::metadata(format!("/proc/{pid}/environ"))?.uid();
    let is_root = witness::status(pid, "Uid").is_some_and(|ids| ids.starts_with("0 "));
    Ok(match (owner, is_root) {
        (_, true) => Some("it is root's, which says nothing".to_owned()),
        (0, false) => None,
        (owner, false) => Some(format!("/proc/{pid} is of user {owner}")),
    })
}

fn limits(pid: u32) -> io::Result<Option<String>> {
    let [core, hard_core] = witness::limit(pid, "Max core file size")?;
    let [_, files] = witness::limit(pid, "Max open files")?;
    let [_, size] = witness::limit(pid, "Max file size")?;
    let few = files
        .parse::<u64>()
        .is_ok_and(|files| files <= MAX_DESCRIPTORS);
    Ok(match () {
        () if core != "0" || hard_core != "0" => Some("it may write core files".to_owned()),
        () if !few => Some(format!("it may open {files} files")),
        () if size == "unlimited" => Some("its files have no bound".to_owned()),
        () => None,
    })
}

fn environment(pid: u32) -> io::Result<Option<String>> {
    let bytes = fs::read(format!("/proc/{pid}/environ"))?.len();
    Ok((bytes > 0).then(|| format!("{bytes} bytes of environment")))
}

fn open_files(pid: u32) -> io::Result<Option<String>> {
    let all = descriptors(pid)?;
    // A pipe with both ends in the process is its own; one that it inherited has an end elsewhere.
    let ends = |link: &Path| all.iter().filter(|(_, other)| other == link).count();
    let foreign: Vec<String> = all
        .iter()
        .filter(|(_, link)| !(is_of_a_vm(link) || is_pipe(link) && ends(link) == 2))
        .map(|(number, link)| format!("descriptor {number} is {}", link.display()))
        .collect();
    Ok((!foreign.is_empty()).then(|| foreign.join(", ")))
}

fn is_pipe(link: &Path) -> bool {
    link.to_string_lossy().starts_with("pipe:[")
}

/// Whether a VM is made of such a thing: sockets and polling, KVM's own descriptors and the TAP, files of its template
/// and its own. Not /dev/kvm, from which a second VM could be made.
fn is_of_a_vm(link: &Path) -> bool {
    let text = link.to_string_lossy();
    let kinds = ["socket:[", "anon_inode:"];
    let devices = ["/dev/net/tun", "/dev/null"];
    let name = link.file_name().unwrap_or_default().to_string_lossy();
    let files = [
        "manifest.json",
        "memory",
        "layer",
        "console.log",
        "vmm.stderr",
        "pagemap",
    ];
    kinds.iter().any(|kind| text.starts_with(kind))
        || devices.contains(&&*text)
        || text.ends_with(" (deleted)")
        || name.ends_with(".erofs")
        || files.contains(&&*name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_no_confined_vmm() {
        let own = std::process::id();
        let cases = of_processes("", &[own]);
        assert_eq!(cases.len(), NAMES.len() - 1);
        let filter = cases.iter().find(|case| case.case == "state-filter");
        assert_eq!(filter.unwrap().verdict, Verdict::Breach);
    }

    #[test]
    fn names_are_those_of_the_questions() {
        for (name, ..) in QUESTIONS {
            assert!(NAMES.contains(&name), "{name}");
        }
    }

    #[test]
    fn descriptors_of_others_are_noticed() {
        assert!(is_of_a_vm(Path::new("socket:[12]")));
        assert!(is_of_a_vm(Path::new("/var/tmp/#123 (deleted)")));
        assert!(is_of_a_vm(Path::new("/t/base/base.erofs")));
        assert!(!is_of_a_vm(Path::new("/var/lib/cube/keys.json")));
        assert!(!is_of_a_vm(Path::new("/dev/kvm")));
        assert!(!is_of_a_vm(Path::new("pipe:[4]")));
    }
}
