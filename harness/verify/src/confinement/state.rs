//! Checks of a VMM's state in /proc. They apply to every VMM, however it was started.

use std::{collections::BTreeSet, fs, io, os::unix::fs::MetadataExt, path::Path};

use super::{
    attempts::Class,
    clone::Cloner,
    process::{self, descriptors},
    scene::Scene,
};
use crate::{
    report::{Case, Verdict},
    setup::{VerifyError, at},
};

/// Number of clones that are checked.
const CLONES: usize = 2;
/// First id of the range of user and group ids for VMMs.
const FIRST_ID: u32 = 200_000;
/// Upper bound for a VMM's limit of open files.
const MAX_DESCRIPTORS: u64 = 8000;
/// Environment variable that selects the layers of confinement in the VMM of mutation runs. A released VMM must not
/// contain it.
const WEAKENING: &str = "CUBE_VMM_LAYERS";
const NO_CAPABILITY: &str = "0000000000000000";

/// A check of one VMM. Returns a description of the fault, or `None`.
type Check = fn(u32) -> io::Result<Option<String>>;

const CHECKS: [(&str, &str, Check); 9] = [
    (
        "state-user",
        "The VMM has its own user and group, which no other process has.",
        user,
    ),
    (
        "state-groups",
        "The process has no supplementary groups.",
        groups,
    ),
    (
        "state-capabilities",
        "No thread has a capability in any of its sets.",
        capabilities,
    ),
    (
        "state-no-new-privileges",
        "Every thread has no_new_privs, so no program can raise its privileges.",
        no_new_privileges,
    ),
    ("state-filter", "Every thread has a seccomp filter.", filter),
    (
        "state-dumpable",
        "The process is not dumpable, so root owns its /proc directory.",
        not_dumpable,
    ),
    (
        "state-limits",
        "Core files are off, and the number of open files and their size are limited.",
        limits,
    ),
    (
        "state-environment",
        "The VMM's environment is empty.",
        environment,
    ),
    (
        "state-descriptors",
        "The VMM has only the files open that its VM consists of.",
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

/// Checks of programs that are not a VMM. The names of the checks are those of VMMs.
pub(super) const OF_SERVICES: [&str; 4] = [
    "state-groups",
    "state-no-new-privileges",
    "state-filter",
    "state-dumpable",
];

/// Checks a process of a program that is not a VMM.
pub(super) fn of_service(prefix: &str, class: Class, pid: io::Result<u32>) -> Vec<Case> {
    let checks = CHECKS
        .iter()
        .filter(|(name, ..)| OF_SERVICES.contains(name));
    let case = |(name, why, check): &(&str, &str, Check)| {
        let found = match &pid {
            Ok(pid) => check(*pid),
            Err(error) => Err(io::Error::other(error.to_string())),
        };
        let fault = found.unwrap_or_else(|error| Some(error.to_string()));
        report(class, prefix, name, why, fault)
    };
    checks.map(case).collect()
}

/// Checks clones that this suite starts, and the VMM's executable.
pub(super) fn of_clones(scene: &Scene, cloner: &Cloner) -> Result<Vec<Case>, VerifyError> {
    let mut clones = vec![cloner.start(&scene.path(""))?];
    while clones.len() < CLONES {
        clones.push(cloner.start_paused(&scene.path(""))?);
    }
    let pids: Vec<u32> = clones.iter().map(|clone| clone.pid()).collect();
    let mut cases = of_processes("", &pids);
    let program = fs::read(&cloner.vmm).map_err(at(&cloner.vmm))?;
    let is_weakenable = program
        .windows(WEAKENING.len())
        .any(|part| part == WEAKENING.as_bytes());
    let fault = is_weakenable.then(|| format!("the executable contains {WEAKENING}"));
    let why = "A released VMM cannot leave out layers of its confinement.";
    cases.push(report(Class::State, "", PROGRAM, why, fault));
    Ok(cases)
}

/// Checks these processes. `prefix` is put before the names of the cases. A check that cannot be made counts as a
/// fault.
pub(super) fn of_processes(prefix: &str, pids: &[u32]) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, why, check) in CHECKS {
        let faults = pids.iter().filter_map(|pid| match check(*pid) {
            Ok(None) => None,
            Ok(Some(what)) => Some(format!("process {pid}: {what}")),
            Err(error) => Some(format!("process {pid}: {error}")),
        });
        cases.push(report(Class::State, prefix, name, why, faults));
    }
    let users: BTreeSet<_> = pids
        .iter()
        .map(|pid| process::status(*pid, "Uid"))
        .collect();
    let shared = users.len() < pids.len();
    let fault = shared.then(|| format!("{} VMMs have only {} users", pids.len(), users.len()));
    let why = "No two VMMs have the same user.";
    cases.push(report(Class::State, prefix, UNIQUE, why, fault));
    cases
}

fn report(
    class: Class,
    prefix: &str,
    name: &str,
    why: &str,
    faults: impl IntoIterator<Item = String>,
) -> Case {
    let faults: Vec<String> = faults.into_iter().collect();
    let verdict = match faults.as_slice() {
        [] => Verdict::Pass,
        _ => Verdict::Breach,
    };
    Case::new(class.name(), &format!("{prefix}{name}"), why).judged(verdict, faults)
}

/// The different values of a line in the `status` files of all threads.
fn values_of_threads(pid: u32, name: &str) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = fs::read_to_string(entry?.path().join("status"))?;
        let value = process::line(&text, name);
        found.insert(
            value
                .ok_or_else(|| io::Error::other(format!("/proc/PID/status has no line {name}")))?,
        );
    }
    Ok(found)
}

/// Returns the first value of a line, in any thread, that is not `wanted`.
fn differs(pid: u32, name: &str, wanted: &str) -> io::Result<Option<String>> {
    let found = values_of_threads(pid, name)?;
    let other = found.into_iter().find(|value| value != wanted);
    Ok(other.map(|value| format!("{name} is {value:?}")))
}

fn user(pid: u32) -> io::Result<Option<String>> {
    for name in ["Uid", "Gid"] {
        for ids in values_of_threads(pid, name)? {
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
        if let Some(fault) = differs(pid, set, NO_CAPABILITY)? {
            return Ok(Some(fault));
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

/// Root owns the files in /proc/PID of a process that is not dumpable (proc(5)).
fn not_dumpable(pid: u32) -> io::Result<Option<String>> {
    let owner = fs::metadata(format!("/proc/{pid}/environ"))?.uid();
    let is_root = process::status(pid, "Uid").is_some_and(|ids| ids.starts_with("0 "));
    Ok(match (owner, is_root) {
        (_, true) => Some("the VMM runs as root, so the owner proves nothing".to_owned()),
        (0, false) => None,
        (owner, false) => Some(format!("user {owner} owns /proc/{pid}")),
    })
}

fn limits(pid: u32) -> io::Result<Option<String>> {
    let [core, hard_core] = process::limit(pid, "Max core file size")?;
    let [_, files] = process::limit(pid, "Max open files")?;
    let [_, size] = process::limit(pid, "Max file size")?;
    let few = files
        .parse::<u64>()
        .is_ok_and(|files| files <= MAX_DESCRIPTORS);
    Ok(match () {
        () if core != "0" || hard_core != "0" => Some("core files are on".to_owned()),
        () if !few => Some(format!("the limit of open files is {files}")),
        () if size == "unlimited" => Some("the size of files is unlimited".to_owned()),
        () => None,
    })
}

fn environment(pid: u32) -> io::Result<Option<String>> {
    let bytes = fs::read(format!("/proc/{pid}/environ"))?.len();
    Ok((bytes > 0).then(|| format!("the environment has {bytes} bytes")))
}

fn open_files(pid: u32) -> io::Result<Option<String>> {
    let all = descriptors(pid)?;
    // The VMM made a pipe itself if it has both ends open. An inherited pipe has an end in another process.
    let ends = |link: &Path| all.iter().filter(|(_, other)| other == link).count();
    let foreign: Vec<String> = all
        .iter()
        .filter(|(_, link)| !(belongs_to_vm(link) || is_pipe(link) && ends(link) == 2))
        .map(|(number, link)| format!("descriptor {number} is {}", link.display()))
        .collect();
    Ok((!foreign.is_empty()).then(|| foreign.join(", ")))
}

fn is_pipe(link: &Path) -> bool {
    link.to_string_lossy().starts_with("pipe:[")
}

/// Whether a VMM may have this file open: sockets, epoll and KVM descriptors, the TAP, deleted files, and files of the
/// template and of the clone. /dev/kvm is not among them, because it would allow a second VM.
fn belongs_to_vm(link: &Path) -> bool {
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
    fn an_unconfined_process_fails_the_checks() {
        let own = std::process::id();
        let cases = of_processes("", &[own]);
        assert_eq!(cases.len(), NAMES.len() - 1);
        let filter = cases.iter().find(|case| case.name == "state-filter");
        assert_eq!(filter.unwrap().verdict, Verdict::Breach);
    }

    #[test]
    fn names_list_every_check() {
        for (name, ..) in CHECKS {
            assert!(NAMES.contains(&name), "{name}");
        }
    }

    #[test]
    fn only_files_of_a_vm_are_accepted() {
        assert!(belongs_to_vm(Path::new("socket:[12]")));
        assert!(belongs_to_vm(Path::new("/var/tmp/#123 (deleted)")));
        assert!(belongs_to_vm(Path::new("/t/base/base.erofs")));
        assert!(!belongs_to_vm(Path::new("/var/lib/cube/keys.json")));
        assert!(!belongs_to_vm(Path::new("/dev/kvm")));
        assert!(!belongs_to_vm(Path::new("pipe:[4]")));
    }
}
