//! The memory limit of the server itself.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    process::{Server, is_running, templates, until},
    streams,
};

/// The memory cgroup of a process.
fn group_of(pid: u32) -> PathBuf {
    let root = Path::new("/sys/fs/cgroup");
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let found = text.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let of_memory = controllers.split(',').any(|name| name == "memory");
        let mount = if of_memory {
            root.join("memory")
        } else if controllers.is_empty() && !root.join("memory").exists() {
            root.to_owned()
        } else {
            return None;
        };
        Some(mount.join(path.trim_start_matches('/')))
    });
    found.unwrap()
}

fn limit_of(group: &Path) -> u64 {
    let files = ["memory.max", "memory.limit_in_bytes"];
    let text = files
        .iter()
        .find_map(|file| fs::read_to_string(group.join(file)).ok());
    text.unwrap().trim().parse().unwrap()
}

/// Memory that the installed templates occupy when loaded.
fn memory_of_templates() -> u64 {
    let each = fs::read_dir(templates()).unwrap().map(|entry| {
        let memory = fs::metadata(entry.unwrap().path().join("memory"));
        memory.unwrap().len().next_multiple_of(2 << 20)
    });
    each.sum()
}

/// The processes of a group, except the egress proxy, which belongs to its server. The proxy is recognized only after
/// it has executed its program.
fn processes_of(group: &Path) -> String {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    let is_proxy = |pid: &&str| {
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program.ends_with("cube-egress")
    };
    let pids: Vec<_> = text.lines().filter(|pid| !is_proxy(pid)).collect();
    pids.join("\n")
}

pub(crate) fn kvm_the_server_is_in_a_control_group_of_its_own() {
    let mut server = Server::open();
    let own = group_of(server.pid());
    let name = own.file_name().unwrap().to_str().unwrap();
    let suffix = format!("-server-{}", server.pid());
    let vms = own.with_file_name(name.strip_suffix(&suffix).unwrap());
    assert_eq!(limit_of(&own), 2 << 30);
    until("only the server is in its cgroup", || {
        processes_of(&own) == server.pid().to_string()
    });

    // A VMM is in the cgroup of its sandbox and not in the server's.
    let sandbox = server.create(&json!({}));
    assert_eq!(group_of(server.vmm_of(&sandbox)), vms.join(&sandbox.id));
    until("only the server is left in its cgroup", || {
        processes_of(&own) == server.pid().to_string()
    });

    // The next server process has its own cgroup with its own limit, and removes the previous one. Loaded templates
    // raise the limit.
    server.kill();
    let former = own;
    server.restart_with(&["--server-memory", "300MiB", "--warm", "1:1"]);
    let own = group_of(server.pid());
    assert_ne!(own, former);
    until("the former server's cgroup is removed", || !former.exists());
    // A VMM of the stock is in the server's cgroup for a moment.
    until("the server is alone in its cgroup", || {
        processes_of(&own) == server.pid().to_string()
    });
    assert!(server.is_up(&sandbox));
    let most = (300 << 20) + memory_of_templates();
    until("the templates are loaded", || limit_of(&own) == most);

    server.stop();
    assert!(!own.exists());
    server.restart_with(&["--server-memory", "none"]);
    assert!(!own.exists());
    assert_eq!(group_of(server.pid()), group_of(std::process::id()));
}

pub(crate) fn kvm_the_group_of_a_replaced_server_is_removed_when_it_ends() {
    let server = Server::open();
    // The second process is killed while it finishes its connections.
    for is_killed in [false, true] {
        let former = server.pid();
        let group = group_of(former);
        let mut idle = streams::idle(TcpStream::connect(server.address).unwrap());
        let pid = server.reload().unwrap();
        assert!(is_running(former) && group.exists());
        if is_killed {
            server.signal_to(former, Signal::SIGKILL);
        } else {
            assert!(streams::ask_again(&mut idle));
        }
        until("the former process ends", || !is_running(former));
        until("its cgroup is removed", || !group.exists());
        assert_eq!(server.pid(), pid);
        assert_eq!(server.get("/health").status, 200);
    }
}
