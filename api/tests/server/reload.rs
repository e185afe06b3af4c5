//! Replaces a server with a new process without any client noticing.

use std::{
    env,
    fs::{self, Permissions},
    io::BufReader,
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    process::{PATIENCE, Server, is_running, until},
    streams::{self, Load},
};

pub(crate) fn kvm_a_reload_refuses_and_cuts_nothing() {
    let mut server = Server::with(&["--insecure-loopback", "--warm", "1:1"]);
    let sandbox = server.create(&json!({}));
    let load = Load::default();
    thread::scope(|scope| {
        let (server, load) = (&server, &load);
        let sandbox = &sandbox;
        let clients = [
            scope.spawn(|| streams::count(server, sandbox, load)),
            scope.spawn(|| streams::type_in_terminal(server, sandbox, load)),
            scope.spawn(|| streams::watch(server, sandbox, load)),
            scope.spawn(|| streams::upload(server, sandbox, load)),
            scope.spawn(|| streams::keep_alive(server.address, load)),
            scope.spawn(|| streams::http2(server.address, load)),
            scope.spawn(|| streams::churn(server, load)),
        ];
        let is_alive = || clients.iter().all(|client| !client.is_finished());
        let count = u32::try_from(clients.len()).unwrap();
        let answered = || load.answered.load(Ordering::Relaxed);
        until("all clients are busy", || {
            load.ready.load(Ordering::Relaxed) == count && answered() > 20
        });
        // The second process hands over while the first still has streams.
        let mut former = server.pid();
        for _ in 0..2 {
            let pid = server.reload().unwrap();
            assert!(pid != former && is_running(former));
            former = pid;
            let before = answered();
            until("requests are answered", || answered() > before + 20);
            assert!(is_alive(), "a client has failed");
        }
        load.over.store(true, Ordering::Relaxed);
    });
    assert_eq!(server.list(), [sandbox.id.as_str()]);
    until("the first process ends with its last stream", || {
        server.first_has_exited()
    });
}

pub(crate) fn kvm_a_terminal_lives_through_many_reloads() {
    let mut server = Server::open();
    let sandbox = server.create(&json!({}));
    let load = Load::default();
    thread::scope(|scope| {
        let (server, load) = (&server, &load);
        let terminal = scope.spawn(|| streams::type_in_terminal(server, &sandbox, load));
        for round in 1..=6 {
            let before = load.answered.load(Ordering::Relaxed);
            until("the terminal echoes", || {
                load.answered.load(Ordering::Relaxed) > before + 2
            });
            assert!(!terminal.is_finished(), "round {round}");
            server.reload().unwrap();
        }
        load.over.store(true, Ordering::Relaxed);
    });
    until("the first process ends", || server.first_has_exited());
    assert!(server.is_up(&sandbox));
}

/// A server whose program is a link, which a test can point to another program.
fn with_replaceable_program(dir: &Path) -> Server {
    let program = dir.join("cube-api");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cube-api"), &program).unwrap();
    Server::of_program(program, &["--insecure-loopback", "--warm", "0:0"])
}

fn replace(program: &Path, script: &str) {
    fs::remove_file(program).unwrap();
    fs::write(program, script).unwrap();
    fs::set_permissions(program, Permissions::from_mode(0o755)).unwrap();
}

pub(crate) fn kvm_a_program_that_does_not_start_leaves_the_old_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_replaceable_program(dir.path());
    let sandbox = server.create(&json!({}));
    let pid = server.pid();
    let real = env!("CARGO_BIN_EXE_cube-api");
    for (script, expected) in [
        ("#!/bin/sh\nexit 3\n".to_owned(), "exit status: 3"),
        ("not a program".to_owned(), "cannot start"),
        // This build checks its options itself.
        (
            format!("#!/bin/sh\nexec {real} \"$@\" --templates /nonexistent\n"),
            "cannot be used multiple times|exit status: 2",
        ),
        (
            format!("#!/bin/sh\nexec {real} \"$@\" --images /nonexistent\n"),
            "pool.images: /nonexistent is not a directory",
        ),
        // A build of the distant future.
        (
            format!("#!/bin/sh\nCUBE_HANDOVER=99 exec {real} \"$@\"\n"),
            "exit status: 6",
        ),
    ] {
        replace(&server.program, &script);
        let why = server.reload().unwrap_err();
        let is_expected = expected.split('|').any(|text| why.contains(text));
        assert!(
            is_expected && why.contains("continues to run"),
            "{script}: {why}"
        );
        assert!(server.is_up(&sandbox));
        assert_eq!(server.pid(), pid);
    }
    server.delete(&sandbox.path("")).expect(204);
    replace(&server.program, &format!("#!/bin/sh\nexec {real} \"$@\"\n"));
    assert_ne!(server.reload().unwrap(), pid);
    server.create(&json!({}));
}

/// The next server's VMM cannot read the files of the previous one.
pub(crate) fn kvm_a_reload_with_another_vmm_keeps_what_runs_and_what_is_paused() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_replaceable_program(dir.path());
    let [running, paused] = [(); 2].map(|()| server.create(&json!({})));
    server.write_file(&paused, "/dev/shm/v", "in memory");
    let vmms = env::var_os("CUBE_LATER_VMMS").expect("set by `cargo xtask test`");
    let later = Path::new(&vmms).join("1/cube-vmm");
    let real = env!("CARGO_BIN_EXE_cube-api");
    let with_later = format!(
        "#!/bin/sh
for word; do shift; case $word in */cube-vmm) word={};; esac; set -- \"$@\" \"$word\"; done
exec {real} \"$@\"
",
        later.display()
    );
    replace(&server.program, &with_later);
    // The script execs the server, so the second reload also starts it with the later VMM.
    for _ in 0..2 {
        server.post(&paused.path("/pause"), &json!({})).expect(204);
        server.reload().unwrap();
        assert!(server.is_up(&running));
        let resume = server.post(&paused.path("/resume"), &json!({"timeout": 300}));
        resume.expect(201);
        assert_eq!(server.read_file(&paused, "/dev/shm/v"), "in memory");
        let metrics = server.get("/metrics").expect(200).text();
        let former = "present=\"false\",use=\"running\"} 2\n";
        assert!(metrics.contains(former), "{metrics}");
    }
    assert_eq!(server.list().len(), 2);
}

/// The new process is killed after it has received everything.
pub(crate) fn kvm_a_server_that_dies_while_it_takes_over_is_replaced_by_the_old_one() {
    let dir = tempfile::tempdir().unwrap();
    let server = with_replaceable_program(dir.path());
    let sandbox = server.create(&json!({}));
    let pid = server.pid();
    let real = env!("CARGO_BIN_EXE_cube-api");
    // The limit of open files makes opening network and pool fail after the process has taken its descriptors.
    let script = format!("#!/bin/sh\nulimit -n 40\nexec {real} \"$@\"\n");
    replace(&server.program, &script);
    let load = Load::default();
    thread::scope(|scope| {
        let (server, load) = (&server, &load);
        let clients = [
            scope.spawn(|| streams::count(server, &sandbox, load)),
            scope.spawn(|| streams::keep_alive(server.address, load)),
            scope.spawn(|| streams::churn(server, load)),
        ];
        until("all clients are busy", || {
            load.ready.load(Ordering::Relaxed) == 3
        });
        let why = server.reload().unwrap_err();
        assert!(why.contains("continues to run"), "{why}");
        let before = load.answered.load(Ordering::Relaxed);
        until("requests are answered", || {
            load.answered.load(Ordering::Relaxed) > before + 20
        });
        assert!(clients.iter().all(|client| !client.is_finished()));
        load.over.store(true, Ordering::Relaxed);
    });
    assert_eq!(server.pid(), pid);
    assert_eq!(server.list(), [sandbox.id.as_str()]);
}

/// Old and new process are killed at moments that the rounds spread over the whole reload.
pub(crate) fn kvm_a_server_killed_during_a_reload_loses_no_sandbox() {
    let mut server = Server::open();
    let running = server.create(&json!({}));
    server.write_file(&running, "/dev/shm/note", "running");
    let paused = server.create(&json!({}));
    server.post(&paused.path("/pause"), &json!({})).expect(204);
    for round in 0..6 {
        let (state, old) = (server.state.path().to_owned(), server.pid());
        server.signal(Signal::SIGHUP);
        thread::sleep(Duration::from_millis(round * 60));
        // In odd rounds the new process survives, if there is one.
        let servers = find_servers(&state);
        let killed = servers
            .into_iter()
            .filter(|pid| round % 2 == 0 || *pid == old);
        for pid in killed {
            kill(pid);
        }
        if round % 2 == 1 {
            // If the new process had everything, it serves; otherwise it exits.
            until("the new process has decided", || {
                let alive = find_servers(&state);
                alive.is_empty() || TcpStream::connect(server.address).is_ok()
            });
            find_servers(&state).into_iter().for_each(kill);
        }
        server.crash_and_restart();
        assert_eq!(server.read_file(&running, "/dev/shm/note"), "running");
        assert_eq!(server.state_of(&paused), "paused");
    }
}

/// Kills a process, and waits until it has closed its sockets.
fn kill(pid: u32) {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(status.is_ok());
    until("the process is gone", || !is_running(pid));
}

fn is_server(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0);
    words.next().is_some_and(|name| name.ends_with(b"cube-api")) && words.next() == Some(b"serve")
}

fn find_servers(state: &Path) -> Vec<u32> {
    let found = Command::new("pgrep").arg("-f").arg(state).output().unwrap();
    let pids = String::from_utf8(found.stdout).unwrap();
    let pids = pids.lines().filter_map(|pid| pid.parse().ok());
    pids.filter(|pid| is_server(*pid) && is_running(*pid))
        .collect()
}

pub(crate) fn kvm_a_deadline_that_passes_during_a_reload_is_acted_upon() {
    let server = Server::open();
    let ending = server.create(&json!({"timeout": 2}));
    let pausing = server.create(&json!({"timeout": 2, "autoPause": true}));
    // The old process must not act on deadlines after it has handed over.
    let mut idle = streams::idle(TcpStream::connect(server.address).unwrap());
    let old = server.pid();
    server.reload().unwrap();
    until("one ends", || !server.is_up(&ending));
    until("the other is paused", || {
        server.state_of(&pausing) == "paused"
    });
    // An idle connection stays open, its next request is served, and the client is told to reconnect.
    assert!(is_running(old));
    assert!(streams::ask_again(&mut idle));
    until("the old process ends", || !is_running(old));
}

pub(crate) fn kvm_systemd_passes_sockets_and_learns_of_reloads() {
    let dir = tempfile::tempdir().unwrap();
    let notify = dir.path().join("notify");
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let told = || {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // As systemd does: the socket is descriptor 3, and LISTEN_PID is the process that executes the program.
    let script = dir.path().join("cube-api");
    let real = env!("CARGO_BIN_EXE_cube-api");
    let inherited = std::os::fd::AsRawFd::as_raw_fd(&listener);
    let path = format!("/proc/{}/fd/{inherited}", std::process::id());
    let start = format!(
        "#!/usr/bin/python3\nimport os, sys\n\
         pid = os.pidfd_open({})\n\
         import ctypes\n\
         fd = ctypes.CDLL(None).syscall(438, pid, {inherited}, 0)\n\
         assert fd >= 0, {path:?}\n\
         os.dup2(fd, 3)\n\
         os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1', NOTIFY_SOCKET={notify:?})\n\
         args = sys.argv[1:]\n\
         at = args.index('--listen')\n\
         os.execv({real:?}, [{real:?}] + args[:at] + args[at + 2:])\n",
        std::process::id()
    );
    fs::write(&script, start).unwrap();
    fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let server = Server::started_at(
        script,
        listener.local_addr().unwrap(),
        &["--insecure-loopback", "--warm", "0:0"],
    );
    drop(listener);
    assert_eq!(told(), "READY=1\n");
    let sandbox = server.create(&json!({}));
    let pid = server.reload().unwrap();
    let reloading = told();
    assert!(
        reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="),
        "{reloading}"
    );
    assert_eq!(told(), format!("MAINPID={pid}\nREADY=1\n"));
    assert!(server.is_up(&sandbox));
    server.signal(Signal::SIGTERM);
    assert_eq!(told(), "STOPPING=1\n");
}

pub(crate) fn kvm_upgraded_connections_live_through_reloads() {
    let server = Server::open();
    let sandbox = server.create(&json!({}));
    streams::start_echo(&server, &sandbox);
    let connect = || TcpStream::connect(server.address).unwrap();
    let upgrade = |stream| streams::upgrade(stream, &server, &sandbox);
    let mut upgraded = vec![upgrade(BufReader::new(connect()))];
    let mut processes = vec![server.pid()];
    for _ in 0..2 {
        let idle = streams::idle(connect());
        processes.push(server.reload().unwrap());
        // Through the old process and the internal socket, and to the new process.
        upgraded.push(upgrade(idle));
        upgraded.push(upgrade(BufReader::new(connect())));
        upgraded.iter_mut().for_each(streams::echo);
    }
    // Every process but the last finishes the streams that began in it.
    let [first, second, last] = processes[..] else {
        panic!("{processes:?}");
    };
    assert!(is_running(first) && is_running(second));
    // The one that began in the first process, and the one that this process forwarded to the second.
    server.signal_to(first, Signal::SIGKILL);
    until("the first process is gone", || !is_running(first));
    upgraded[2..].iter_mut().for_each(streams::echo);
    assert!(server.is_up(&sandbox));
    drop(upgraded);
    until("the second ends", || !is_running(second));
    assert!(is_running(last));
}

pub(crate) fn kvm_reloads_at_the_same_time_leave_one_server() {
    let server = Server::open();
    let sandbox = server.create(&json!({}));
    thread::scope(|scope| {
        let server = &server;
        let reloads = [(); 4].map(|()| scope.spawn(|| server.reload()));
        server.signal(Signal::SIGHUP);
        for reload in reloads {
            reload.join().unwrap().unwrap();
        }
    });
    until("one process is left", || {
        let servers = find_servers(server.state.path());
        servers.len() == 1
    });
    assert!(server.is_up(&sandbox));
    server.adopt_serving(find_servers(server.state.path())[0]);
    assert_eq!(server.list(), [sandbox.id]);
}

/// A server is killed, and the next one is replaced while it still waits for a VMM.
pub(crate) fn kvm_a_reload_does_not_wait_for_a_silent_vmm() {
    let mut server = Server::open();
    let [silent, other] = [(); 2].map(|()| server.create(&json!({})));
    server.write_file(&silent, "/dev/shm/note", "kept");
    let vmm = server.vmm_of(&silent);
    server.kill();
    server.signal_to(vmm, Signal::SIGSTOP);
    server.restart();
    assert!(server.is_up(&other));
    let reloaded = [(); 2].map(|()| server.reload());
    server.signal_to(vmm, Signal::SIGCONT);
    for reload in reloaded {
        reload.unwrap();
    }
    assert_eq!(server.read_file(&silent, "/dev/shm/note"), "kept");
    assert!(server.is_up(&other));
    // The VMM also responds to the requests of the earlier processes, which has no effect.
    server.post(&silent.path("/pause"), &json!({})).expect(204);
    assert_eq!(server.state_of(&silent), "paused");
}

/// Only the new process is killed, at moments that the rounds spread over the whole reload.
pub(crate) fn kvm_a_new_process_killed_at_any_moment_leaves_a_server_or_a_clean_start() {
    let mut server = Server::open();
    let sandbox = server.create(&json!({}));
    server.write_file(&sandbox, "/dev/shm/note", "kept");
    let mut went_on = 0;
    for round in 0..10 {
        let old = server.pid();
        let outcome = thread::scope(|scope| {
            let server = &server;
            let reload = scope.spawn(|| server.reload());
            let is_new = |pid: &u32| *pid != old;
            let state = server.state.path();
            // A search takes as long as a large part of a handover on an idle host, so it is done once.
            let mut new = Vec::new();
            until("the new process has started", || {
                let is_last = reload.is_finished();
                new = find_servers(state).into_iter().filter(is_new).collect();
                is_last || !new.is_empty()
            });
            thread::sleep(Duration::from_millis(round * 20));
            new.into_iter().for_each(kill);
            reload.join().unwrap()
        });
        if outcome.is_err() {
            went_on += 1;
            assert_eq!(server.pid(), old);
        } else {
            // It served before it was killed. Its predecessor reaps it, after which no process has its id.
            let killed = PathBuf::from(format!("/proc/{}", server.pid()));
            until("the killed process is reaped", || !killed.exists());
            server.crash_and_restart();
        }
        assert_eq!(server.read_file(&sandbox, "/dev/shm/note"), "kept");
        assert_eq!(server.list(), [sandbox.id.as_str()]);
    }
    assert!(went_on > 0, "every process was killed too late");
}
