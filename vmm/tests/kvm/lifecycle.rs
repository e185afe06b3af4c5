//! Pause and resume, snapshots of clones, the end of a guest, the end of the client.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    slice, thread,
    time::{Duration, Instant},
};

use envd::{ENVD_PORT, EnvdClient};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vmm_control::{
    Call, ControlClient, ControlError, Failure, FailureKind, Reply, Request, VmPhase, VmUser,
    frame, spawn_detached,
};

use crate::support::{
    TestVm, host, run_dir, template, until,
    vm::{PATIENCE, as_root, refusal},
};

/// CPU time of a process in clock ticks of 10 ms.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let stat = model::ProcessStat::parse(&stat).expect("proc_pid_stat(5)");
    stat.cpu_ticks
}

/// Disk space in bytes of a process's unlinked files: the layer of its VM.
fn layer_bytes(pid: u32) -> u64 {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let files = files.filter_map(|fd| fs::metadata(fd.ok()?.path()).ok());
    let unlinked = files.filter(|file| file.is_file() && file.nlink() == 0);
    unlinked.map(|file| file.blocks() * 512).sum()
}

pub(crate) fn kvm_space_of_deleted_files_returns_to_the_host() {
    const MIB: u64 = 1 << 20;
    let mut vm = TestVm::new();
    vm.sh("head -c 100M /dev/urandom > /root/big; sync");
    let written = layer_bytes(vm.pid());
    assert!(written >= 100 * MIB, "{written}");
    vm.sh("rm /root/big; sync");
    until("the space is back", Duration::from_secs(20), || {
        (layer_bytes(vm.pid()) + 95 * MIB <= written).then_some(())
    });
    // A snapshot does not contain the deleted data either, and the disk is consistent.
    let dir = run_dir::make("trimmed").join("t");
    vm.control().snapshot_diff(&dir).expect("a snapshot");
    let layer = fs::metadata(dir.join("layer")).expect("a layer").len();
    assert!(layer < 5 * MIB, "{layer}");
    let clone = TestVm::clone_of(&dir);
    assert_eq!(
        clone.sh("ls /root; head -c 8M /dev/zero > /root/new; sync; echo on"),
        "on"
    );
}

pub(crate) fn kvm_a_paused_guest_does_not_run() {
    let mut vm = TestVm::new();
    vm.sh("while :; do :; done >/dev/null 2>&1 </dev/null & disown");
    let pid = vm.pid();
    let ticks = |vm: &mut TestVm, more: u64| {
        let start = cpu_ticks(pid);
        until("the guest spins", Duration::from_secs(20), || {
            (cpu_ticks(pid) >= start + more).then_some(())
        });
        vm.stats().exits
    };
    ticks(&mut vm, 5);
    for _ in 0..3 {
        vm.control().pause().expect("a pause");
        vm.control().pause().expect("a pause of a paused VM");
        let before = (cpu_ticks(pid), vm.stats().exits);
        // The agent accepts no connection. The attempts also make time pass.
        let connect = EnvdClient::connect(&vm.vsock(), ENVD_PORT, Duration::from_millis(300));
        assert!(connect.is_err(), "a paused guest answers");
        assert!(
            cpu_ticks(pid) <= before.0 + 3,
            "a paused guest uses the CPU"
        );
        let after = vm.stats();
        assert_eq!((after.phase, after.exits), (VmPhase::Paused, before.1));
        vm.control().resume().expect("a resume");
        ticks(&mut vm, 5);
        assert_eq!(vm.sh("echo on"), "on");
    }
    vm.assert_healthy();
}

/// The guest does not notice a pause: its clock continues where it stopped, its timers have the same time left, and its
/// kernel detects no stall.
pub(crate) fn kvm_a_guest_does_not_notice_a_pause() {
    let mut vm = TestVm::new();
    let uptime = |vm: &TestVm| -> f64 {
        let text = vm.sh("cat /proc/uptime");
        let word = text.split(' ').next().unwrap_or_default();
        word.parse().expect("seconds")
    };
    vm.sh("(sleep 8; touch /root/slept) >/dev/null 2>&1 </dev/null & disown");
    let before = uptime(&vm);
    vm.control().pause().expect("a pause");
    // The sleep is part of the test: the paused time must pass.
    let paused = Instant::now();
    until("time passes", Duration::from_secs(60), || {
        (paused.elapsed() > Duration::from_secs(12)).then_some(())
    });
    vm.control().resume().expect("a resume");
    let after = uptime(&vm);
    assert!(after >= before, "{before} {after}");
    assert!(
        after - before < 8.0,
        "the guest's clock jumped: {before} {after}"
    );
    assert_eq!(vm.sh("test -e /root/slept || echo sleeps"), "sleeps");
    until("the timer fires", Duration::from_secs(60), || {
        (vm.sh("test -e /root/slept && echo slept || true") == "slept").then_some(())
    });
    vm.assert_healthy();
}

/// A VMM with a listening control socket serves the next client after the first one has disconnected, and exits when
/// its guest ends.
pub(crate) fn kvm_a_listening_vmm_outlives_its_client() {
    let dir = run_dir::make("listening");
    let control = dir.join("control");
    let connect = || ControlClient::connect(&control, Some(PATIENCE)).expect("a client");
    let log = fs::File::create(dir.join("log")).expect("a log");
    let user = VmUser::new(VmUser::POOL.start);
    let mut child =
        spawn_detached(&host::program(), &control, log, user, &[]).expect("cube-vmm starts");
    let mut first = connect();
    first.restore(spec_of_clone(&dir), None).expect("a restore");
    first.resume().expect("a resume");
    // The second client waits until the first one has left.
    let mut second = connect();
    drop(first);
    assert_eq!(second.stats().expect("stats").phase, VmPhase::Running);
    drop(second);
    let mut agent = EnvdClient::connect(&dir.join("vsock"), ENVD_PORT, PATIENCE).expect("an agent");
    agent.health().expect("health");
    let off = as_root("/bin/bash", &["-c", &reboot("0x4321fedc")]);
    // No response is expected.
    let _ = agent.exec(&off, Duration::from_secs(1));
    let status = until("the VMM ends", Duration::from_secs(20), || {
        child.try_wait().expect("a child")
    });
    assert!(!status.success());
    let log = fs::read_to_string(dir.join("log")).expect("a log");
    assert!(log.contains("powered off"), "{log}");
}

/// A VMM that cannot join its cgroup, which limits its memory, exits. A plain file stands for `tasks`.
pub(crate) fn kvm_a_vmm_joins_its_groups_or_ends() {
    let dir = run_dir::make("join");
    let (joined, missing) = (dir.join("tasks"), dir.join("missing/tasks"));
    fs::write(&joined, "").expect("a file");
    let user = VmUser::new(VmUser::POOL.start);
    let start = |name: &str, join: &[PathBuf]| {
        let log = fs::File::create(dir.join("log")).expect("a log");
        spawn_detached(&host::program(), &dir.join(name), log, user, join).expect("cube-vmm starts")
    };
    let mut child = start("first", slice::from_ref(&joined));
    let mut client = ControlClient::connect(&dir.join("first"), Some(PATIENCE)).expect("a client");
    client
        .restore(spec_of_clone(&dir), None)
        .expect("a restore");
    assert_eq!(fs::read_to_string(&joined).expect("a file"), "0");
    child.kill().expect("a running VMM");
    child.wait().expect("a child");

    let mut child = start("second", &[joined, missing.clone()]);
    let status = until("the VMM ends", PATIENCE, || {
        child.try_wait().expect("a child")
    });
    assert!(!status.success());
    let log = fs::read_to_string(dir.join("log")).expect("a log");
    assert!(log.contains(missing.to_str().expect("a path")), "{log}");
}

/// On a busy host, a client has sent its request before the VMM accepts it. A guest that never halts gives the VMM no
/// other reason to check.
pub(crate) fn kvm_a_request_that_is_older_than_its_connection_is_answered() {
    let dir = run_dir::make("older");
    let control = dir.join("control");
    let log = fs::File::create(dir.join("log")).expect("a log");
    let user = VmUser::new(VmUser::POOL.start);
    let mut child =
        spawn_detached(&host::program(), &control, log, user, &[]).expect("cube-vmm starts");
    let mut first = ControlClient::connect(&control, Some(PATIENCE)).expect("a client");
    first.restore(spec_of_clone(&dir), None).expect("a restore");
    first.resume().expect("a resume");
    drop(first);
    let mut agent = EnvdClient::connect(&dir.join("vsock"), ENVD_PORT, PATIENCE).expect("an agent");
    let busy = "setsid bash -c 'while :; do :; done' </dev/null >/dev/null 2>&1 &";
    let request = as_root("/bin/bash", &["-c", busy]);
    agent.exec(&request, PATIENCE).expect("a busy guest");
    drop(agent);
    let vmm = Pid::from_raw(child.id().try_into().expect("a process id"));
    // Until the end of the agent's connection has been served.
    thread::sleep(Duration::from_secs(1));
    for _ in 0..3 {
        kill(vmm, Signal::SIGSTOP).expect("a stop");
        let client = UnixStream::connect(&control).expect("a client");
        client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        frame::send(&client, &Call::from(Request::Stats), &[]).expect("a request");
        kill(vmm, Signal::SIGCONT).expect("a start");
        let (answer, _) = frame::receive::<Result<Reply, Failure>>(&client).expect("an answer");
        assert!(matches!(answer, Ok(Reply::Stats(_))), "{answer:?}");
    }
    child.kill().expect("a kill");
    child.wait().expect("an end");
}

fn spec_of_clone(dir: &Path) -> model::RestoreSpec {
    model::RestoreSpec {
        template: template().into(),
        base: None,
        root: None,
        vsock: dir.join("vsock"),
        console: None,
        layer_limit: None,
        prefault: model::WorkingSetPrefault::On,
    }
}

pub(crate) fn kvm_requests_in_the_wrong_phase_are_refused() {
    let mut vm = TestVm::spawn();
    let kind = |answer: Result<(), ControlError>| refusal(answer).expect_err("a refusal").kind;
    assert_eq!(kind(vm.control().pause()), FailureKind::WrongPhase);
    assert_eq!(kind(vm.control().resume()), FailureKind::WrongPhase);
    let dir = run_dir::make("none").join("t");
    assert_eq!(kind(vm.control().snapshot(&dir)), FailureKind::WrongPhase);
    assert_eq!(vm.stats().phase, VmPhase::Empty);
    vm.restore(template()).expect("a restore");
    assert_eq!(vm.stats().phase, VmPhase::Paused);
    assert_eq!(
        vm.restore(template()).expect_err("a refusal").kind,
        FailureKind::WrongPhase
    );
    vm.control().resume().expect("a resume");
    vm.identify();
    assert!(!dir.exists());
}

pub(crate) fn kvm_clones_of_clones_keep_what_they_inherit() {
    let mut dirs = Vec::new();
    let mut vm = TestVm::new();
    for generation in 0..4 {
        vm.sh(&format!(
            "echo {generation} >> /root/line; echo {generation} >> /dev/shm/line"
        ));
        let dir = run_dir::make("chain").join("t");
        vm.control().snapshot(&dir).expect("a snapshot");
        // The source continues independently after its snapshot.
        vm.control().resume().expect("a resume");
        vm.sh("echo later >> /root/line");
        vm = TestVm::clone_of(&dir);
        let want: Vec<String> = (0..=generation).map(|g| g.to_string()).collect();
        for file in ["/root/line", "/dev/shm/line"] {
            assert_eq!(vm.sh(&format!("cat {file}")), want.join("\n"));
        }
        dirs.push(dir);
    }
    vm.assert_healthy();
    // An older snapshot is unchanged.
    assert_eq!(TestVm::clone_of(&dirs[0]).sh("cat /root/line"), "0");
}

/// The source's stream continues after the snapshot. The clone's stream is reset, and its agent keeps serving.
pub(crate) fn kvm_streams_open_at_a_snapshot() {
    let dir = run_dir::make("streams").join("t");
    let mut vm = TestVm::new();
    let sockets = "ls -l /proc/1/fd | grep -c socket";
    let without = vm.sh(sockets);
    let mut agent = vm.agent();
    let wait = "echo begun; until test -e /root/go; do sleep 0.01; done; echo done";
    let mut stream = agent
        .start(
            &as_root("/bin/bash", &["-c", wait]),
            Duration::from_secs(60),
        )
        .expect("a stream");
    let first = stream
        .next_event()
        .expect("an event")
        .and_then(|e| e.data)
        .expect("data");
    assert_eq!(first.stdout.expect("output").0, b"begun\n");
    vm.control().snapshot(&dir).expect("a snapshot");
    vm.control().resume().expect("a resume");
    vm.sh("touch /root/go");
    let second = stream
        .next_event()
        .expect("an event")
        .and_then(|e| e.data)
        .expect("data");
    assert_eq!(second.stdout.expect("output").0, b"done\n");

    let clone = TestVm::clone_of(&dir);
    assert_eq!(clone.sh("echo served"), "served");
    until(
        "the inherited connection is gone",
        Duration::from_secs(10),
        || (clone.sh(sockets) == without).then_some(()),
    );
    for _ in 0..20 {
        assert_eq!(clone.sh("echo served"), "served");
    }
    clone.assert_healthy();
}

/// Makes the guest end and waits for the reason that the VMM reports.
fn ends_with(script: &str) -> String {
    let mut vm = TestVm::new();
    // No response is expected: the guest may end before the agent can send one.
    let _ = vm.agent().exec(
        &as_root("/bin/bash", &["-c", script]),
        Duration::from_secs(1),
    );
    let reason = vm.ended(Duration::from_secs(20));
    let failure = refusal(vm.control().resume()).expect_err("a refusal");
    assert_eq!(failure.kind, FailureKind::GuestExited);
    assert!(failure.message.contains(&reason), "{failure}");
    vm.control().shutdown().expect("a shutdown");
    reason
}

/// reboot(2) with a magic number.
fn reboot(command: &str) -> String {
    format!("python3 -c 'import ctypes; ctypes.CDLL(None).reboot({command})'")
}

pub(crate) fn kvm_the_end_of_a_guest_is_reported() {
    assert_eq!(
        ends_with(&reboot("0x1234567")),
        "the guest requested a reboot"
    );
    assert_eq!(ends_with(&reboot("0x4321fedc")), "the guest powered off");
    assert_eq!(
        ends_with("echo b > /proc/sysrq-trigger"),
        "the guest requested a reboot"
    );
    let crash = "the guest kernel crashed (see the console for the reason)";
    assert_eq!(ends_with("echo c > /proc/sysrq-trigger"), crash);
    // PID 1 is the agent.
    assert_eq!(
        ends_with("kill -SEGV 1; kill -TERM 1; sleep 20"),
        "the guest powered off"
    );
}

/// Environment variable that makes this program act as the client that the test kills.
pub(crate) const CLIENT: &str = "CUBE_TEST_CLIENT";

/// Runs a clone and prints its VMM's pid; exits at end-of-file on standard input.
pub(crate) fn be_client(template: &str) {
    let vm = TestVm::clone_of(template.as_ref());
    println!("{}", vm.pid());
    let _ = std::io::stdin().lines().count();
}

/// After SIGKILL of the client, the VMM reads end-of-file on the control socket and exits.
pub(crate) fn kvm_the_vmm_ends_with_its_client() {
    let mut client = Command::new(std::env::current_exe().expect("this program"))
        .env(CLIENT, template())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a client");
    let mut line = String::new();
    BufReader::new(client.stdout.take().expect("a pipe"))
        .read_line(&mut line)
        .expect("a line");
    let vmm: u32 = line.trim().parse().expect("a process id");
    let alive =
        || fs::read_to_string(format!("/proc/{vmm}/comm")).is_ok_and(|n| n.trim() == "cube-vmm");
    assert!(alive());
    client.kill().expect("a kill");
    client.wait().expect("its end");
    let start = Instant::now();
    until("the VMM ends", Duration::from_secs(10), || {
        (!alive()).then_some(())
    });
    eprintln!("the VMM ended {:?} after its client", start.elapsed());
    // The next run removes what the killed client left in its directory.
    run_dir::sweep();
}

/// An orderly shutdown removes the socket, and a VM that was never built leaves none.
pub(crate) fn kvm_shutdown_leaves_no_socket() {
    let mut vm = TestVm::new();
    assert!(vm.vsock().exists());
    vm.control().shutdown().expect("a shutdown");
    let process = vm.take_process();
    let pid = process.pid();
    until("the VMM ends", Duration::from_secs(10), || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.contains(") Z ").then_some(())
    });
    assert!(!vm.vsock().exists(), "the socket file still exists");
    drop(process);
}

/// Guest programs that check themselves for about a second each.
const BUSY: [&str; 3] = ["vectors", "bases", "threads"];

/// Starts all of them at once in the background.
pub(crate) fn start_busy(vm: &TestVm) {
    for name in BUSY {
        vm.upload(name);
    }
    let names = BUSY.join(" ");
    vm.sh(&format!(
        "for p in {names}; do (/root/$p; echo ended $?) >/root/out.$p 2>&1 </dev/null & done; disown -a"
    ));
}

/// Waits until all programs have ended, and checks that they succeeded.
pub(crate) fn finish_busy(vm: &TestVm) {
    let all = BUSY.len();
    let said = vm.sh(&format!(
        "for i in $(seq 500); do test $(cat /root/out.* | grep -c ended) = {all} && break; sleep 0.1; done; cat /root/out.*"
    ));
    assert_eq!(said.matches("ended 0").count(), BUSY.len(), "{said}");
    vm.assert_healthy();
}

/// A snapshot can be taken at any instruction, including those of the monitor while it handles a fault. Takes many
/// snapshots of a guest that does nothing but fault, each of a clone of the previous one.
pub(crate) fn kvm_faults_under_way_survive_a_snapshot() {
    const GENERATIONS: u64 = 100;
    let mut vm = TestVm::new();
    vm.upload("faults");
    vm.sh("(/root/faults /root/stop; echo ended $?) >/root/out.faults 2>&1 </dev/null & disown");
    for generation in 0..GENERATIONS {
        // Varies the time between a response and the snapshot.
        thread::sleep(Duration::from_micros(generation % 10 * 700));
        let dir = run_dir::make("faults").join("t");
        vm.control().snapshot_diff(&dir).expect("a snapshot");
        vm = TestVm::clone_of(&dir);
        let said = vm.sh("cat /root/out.faults");
        assert_eq!(
            said,
            "",
            "generation {generation}: {}",
            vm.sh("dmesg | tail -n 3")
        );
        fs::remove_dir_all(&dir).expect("a removal");
    }
    vm.sh("touch /root/stop");
    let ended = "for i in $(seq 100); do grep ended /root/out.faults && break; sleep 0.1; done";
    assert_eq!(vm.sh(ended), "ended 0");
    vm.assert_healthy();
}

/// Registers, mappings, locks and pending signals of a busy guest are all in its snapshot.
pub(crate) fn kvm_busy_programs_survive_a_snapshot() {
    let dir = run_dir::make("busy").join("t");
    let mut vm = TestVm::new();
    start_busy(&vm);
    vm.control().snapshot(&dir).expect("a snapshot");
    vm.control().resume().expect("a resume");
    for _ in 0..2 {
        let clone = TestVm::clone_of(&dir);
        let running = clone.sh(&format!("pgrep -c '^({})$' || true", BUSY.join("|")));
        assert_ne!(
            running, "0",
            "no program was running: the snapshot was taken too late"
        );
        finish_busy(&clone);
    }
    finish_busy(&vm);
}

/// Clones of a template whose memory was copied into huge pages. All clones map these pages, and none changes them.
pub(crate) fn kvm_clones_of_a_loaded_template() {
    use vmm_control::template::{LoadError, LoadedTemplate};
    let loaded = match LoadedTemplate::load(template()) {
        Ok(loaded) => loaded,
        Err(LoadError::Tmpfs(why)) => {
            eprintln!("tested only that loading is refused: {why}");
            return;
        }
        Err(other) => panic!("{other:?}"),
    };
    let memory = loaded.dir().join(model::template_file::MEMORY);
    let sum = crate::support::sparse_sum;
    let before = sum(&memory);
    assert_eq!(before, sum(&template().join(model::template_file::MEMORY)));
    let (a, b) = (
        TestVm::clone_of(&loaded.dir()),
        TestVm::clone_of(&loaded.dir()),
    );
    assert_ne!(a.sh("cat /etc/machine-id"), b.sh("cat /etc/machine-id"));
    start_busy(&a);
    start_busy(&b);
    finish_busy(&a);
    finish_busy(&b);
    assert_eq!(sum(&memory), before, "a clone wrote to its template");
    // Clones outlive the loaded template.
    drop(loaded);
    assert_eq!(a.sh("cat /usr/lib/os-release | head -c 6"), "PRETTY");
    assert_eq!(b.check("cow", ""), "ok");
}
