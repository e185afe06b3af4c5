//! `cube sandbox`, `cube snapshot`.

use std::{fs, io::Read, os::unix::fs::PermissionsExt};

use nix::sys::signal::Signal;

use crate::world::{Ran, World, seconds, signal, until};

pub(crate) fn kvm_a_sandbox_is_created_used_and_killed() {
    let world = World::open();
    let words = [
        "sandbox",
        "create",
        "--metadata",
        "who=a b",
        "--env",
        "X=1",
        "--timeout",
        "10m",
    ];
    let id = world.run(&words).line();
    let other = world.sandbox();
    let listed = world
        .run(&["sandbox", "list", "--metadata", "who=a b"])
        .expect(0)
        .stdout;
    assert!(
        listed.starts_with("ID") && listed.contains(&id) && !listed.contains(&other),
        "{listed}"
    );
    let ran = world.run_with(
        &[
            "sandbox",
            "exec",
            "-i",
            &id,
            "--",
            "sh",
            "-c",
            "echo $X; cat",
        ],
        b"in",
    );
    assert_eq!(ran.expect(0).stdout, "1\nin");
    world
        .run(&["sandbox", "exec", &id, "--", "false"])
        .expect(1);
    let info = world.run(&["sandbox", "info", &id]).expect(0).stdout;
    assert!(
        info.contains("running") && info.contains("who=a b"),
        "{info}"
    );
    let item = &world
        .run(&["sandbox", "info", &id, "--json"])
        .items("sandbox")[0];
    assert_eq!(
        (item["sandboxID"].as_str(), &item["envdAccessToken"]),
        (Some(id.as_str()), &serde_json::Value::Null)
    );
    assert!(
        !world
            .run(&["sandbox", "logs", &id])
            .expect(0)
            .stdout
            .is_empty()
    );
    until("there are figures", || {
        !world
            .run(&["sandbox", "metrics", &id, "--json"])
            .items("metric")
            .is_empty()
    });
    assert_eq!(world.run(&["sandbox", "timeout", &id, "20m"]).line(), id);
    let url = world.run(&["sandbox", "url", &id, "8000"]).line();
    assert!(url.ends_with(&format!("/sandbox/{id}/8000/")), "{url}");
    let policy = world.run(&["sandbox", "network", &id]).expect(0).stdout;
    assert!(policy.contains("as the server is configured"), "{policy}");
    let mut follower = world.spawn(&["sandbox", "logs", "--follow", &id]);
    let mut first = [0];
    follower
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut first)
        .unwrap();
    assert_eq!(world.run(&["sandbox", "kill", &id]).line(), id);
    assert!(follower.wait_with_output().unwrap().status.success());
    let again = world.run(&["sandbox", "kill", &id]).expect(1);
    assert!(again.stderr.contains("was not found") && again.stderr.contains("cube sandbox list"));
    a_node_is_closed_and_drained(&world);
    world.is_empty_soon();
}

/// A single server is one node. There is a sandbox.
fn a_node_is_closed_and_drained(world: &World) {
    let node = world.run(&["node", "list", "--json"]).items("node")[0]["id"].clone();
    let node = node.as_str().unwrap();
    let info = world.run(&["node", "info", node]).expect(0).stdout;
    assert!(info.contains("ready") && info.contains("MiB of"), "{info}");
    assert_eq!(
        world.run(&["node", "cordon", node]).line(),
        format!("{node} standby")
    );
    let refused = world.run(&["sandbox", "create"]).expect(1);
    assert!(refused.stderr.contains("standby"), "{}", refused.stderr);
    let drain = ["node", "drain", node, "--wait", "--timeout", "1ms"];
    let waits = world.run(&drain).expect(1);
    assert!(
        waits
            .stderr
            .contains("1 running sandboxes, the last ends at"),
        "{}",
        waits.stderr
    );
    world.run(&["sandbox", "kill", "--all"]).expect(0);
    let drained = world
        .run(&["node", "drain", node, "--wait"])
        .expect(0)
        .stdout;
    assert!(drained.contains("drained"), "{drained}");
    world.run(&["node", "uncordon", node]).expect(0);
    world.sandbox();
    world.run(&["sandbox", "kill", "--all"]).expect(0);
    let unknown = world.run(&["node", "info", "nobody"]).expect(1);
    assert!(
        unknown.stderr.contains("cube node list"),
        "{}",
        unknown.stderr
    );
}

pub(crate) fn kvm_a_sandbox_is_paused_resumed_forked_and_kept() {
    let world = World::open();
    let id = world.sandbox();
    let exec = |id: &str, script: &str| {
        world
            .run(&["sandbox", "exec", id, "--", "sh", "-c", script])
            .expect(0)
            .stdout
    };
    exec(&id, "echo kept > /dev/shm/f");
    world.run(&["sandbox", "pause", &id]).expect(0);
    assert!(
        world
            .run(&["sandbox", "list", "--state", "paused"])
            .expect(0)
            .stdout
            .contains(&id)
    );
    let twice = world.run(&["sandbox", "pause", &id]).expect(1);
    assert!(twice.stderr.contains("paused"), "{}", twice.stderr);
    assert_eq!(world.run(&["sandbox", "resume", &id]).line(), id);
    assert_eq!(exec(&id, "cat /dev/shm/f"), "kept\n");
    // A command resumes a paused sandbox.
    world.run(&["sandbox", "pause", &id]).expect(0);
    assert_eq!(exec(&id, "cat /dev/shm/f"), "kept\n");
    let forks = world
        .run(&["sandbox", "fork", "-n", "2", &id])
        .expect(0)
        .stdout;
    assert_eq!(forks.lines().count(), 2, "{forks}");
    for fork in forks.lines() {
        assert_eq!(exec(fork, "cat /dev/shm/f"), "kept\n");
    }
    let snapshot = world
        .run(&["snapshot", "create", &id, "--name", "kept:v1"])
        .line();
    assert!(
        world
            .run(&["snapshot", "list"])
            .expect(0)
            .stdout
            .contains("kept:v1")
    );
    let from = world.run(&["run", "--template", "kept:v1", "--", "cat", "/dev/shm/f"]);
    assert_eq!(from.line(), "kept");
    assert_eq!(
        world.run(&["snapshot", "delete", &snapshot]).line(),
        snapshot
    );
    world.run(&["sandbox", "kill", "--all"]).expect(0);
    world.is_empty_soon();
}

pub(crate) fn kvm_a_sandbox_lives_as_long_as_it_is_used_and_a_paused_one_stays_paused() {
    let world = World::open();
    let short = || world.run(&["sandbox", "create", "--timeout", "3s"]).line();
    let left_s = |id: &str| {
        let item = &world
            .run(&["--json", "sandbox", "info", id])
            .items("sandbox")[0];
        seconds(&item["endAt"]) - seconds(&item["startedAt"])
    };
    let id = short();
    world
        .run(&["sandbox", "exec", &id, "--", "sleep", "5"])
        .expect(0);
    let id = short();
    let there = format!("{id}:/tmp/copy");
    world
        .run(&["sandbox", "cp", "/etc/passwd", &there])
        .expect(0);
    assert!(left_s(&id) >= 100, "{}", left_s(&id));

    let id = short();
    world.run(&["sandbox", "pause", &id]).expect(0);
    world.run(&["sandbox", "exec", &id, "true"]).expect(0);
    world.run(&["sandbox", "timeout", &id, "1s"]).expect(0);
    until("the sandbox is paused again", || {
        let listed = world.run(&["sandbox", "list", "--state", "paused"]);
        listed.expect(0).stdout.contains(&id)
    });
    world.run(&["sandbox", "kill", "--all"]).expect(0);
}

pub(crate) fn kvm_files_and_directories_are_copied_both_ways() {
    let world = World::open();
    let id = world.sandbox();
    let dir = world.dir.path().join("files");
    let (tree, back) = (dir.join("tree"), dir.join("back"));
    fs::create_dir_all(tree.join("inner/empty")).unwrap();
    let large: Vec<u8> = (0..10_000_000_u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    fs::write(tree.join("large"), &large).unwrap();
    fs::write(tree.join("inner/run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(tree.join("inner/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("/etc", tree.join("link")).unwrap();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let there = |path: &str| format!("{id}:{path}");

    // Copies a file to a new name, and into a directory.
    world
        .run(&[
            "sandbox",
            "cp",
            &text(&tree.join("large")),
            &there("/tmp/copy"),
        ])
        .expect(0);
    world
        .run(&["sandbox", "cp", &there("/tmp/copy"), &text(&back)])
        .expect(0);
    assert_eq!(fs::read(&back).unwrap(), large);
    // A failed copy keeps an existing file, and leaves nothing next to it.
    let unreadable = ["sandbox", "cp", &there("/proc/1/mem"), &text(&back)];
    // The agent aborts a response that it has begun.
    let cut = world.run(&unreadable);
    assert!(matches!(cut.code, 1 | 7), "{}", cut.stderr);
    assert_eq!(fs::read(&back).unwrap(), large);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
    world
        .run(&["sandbox", "cp", &text(&tree.join("large")), &there("/tmp")])
        .expect(0);
    let sizes = world.run(&[
        "sandbox",
        "exec",
        &id,
        "--",
        "stat",
        "-c",
        "%s",
        "/tmp/large",
    ]);
    assert_eq!(sizes.line(), "10000000");

    // A directory, with the modes of programs. Links to directories are not followed.
    let put = world.run(&["--json", "sandbox", "cp", &text(&tree), &there("/tmp/put")]);
    assert!(put.stderr.contains("link"), "{}", put.stderr);
    assert_eq!(put.items("copy")[0]["files"], 2);
    assert_eq!(
        world
            .run(&["sandbox", "exec", &id, "--", "/tmp/put/inner/run.sh"])
            .line(),
        "ran"
    );
    let script =
        "test -d /tmp/put/inner/empty && ln -s /etc /tmp/put/out && ln -s large /tmp/put/same";
    world
        .run(&["sandbox", "exec", &id, "--", "sh", "-c", script])
        .expect(0);
    let got = dir.join("got");
    world
        .run(&["sandbox", "cp", &there("/tmp/put"), &text(&got)])
        .expect(0);
    assert_eq!(fs::read(got.join("large")).unwrap(), large);
    assert_eq!(fs::read(got.join("same")).unwrap(), large);
    let mode = fs::metadata(got.join("inner/run.sh"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o111, 0o111);
    assert!(got.join("inner/empty").is_dir() && !got.join("out").exists());

    // A signal leaves no part of a file.
    let grow = [
        "sandbox", "exec", &id, "--", "truncate", "-s", "3G", "/tmp/big",
    ];
    world.run(&grow).expect(0);
    let (big, entries) = (dir.join("big"), || fs::read_dir(&dir).unwrap().count());
    let before = entries();
    let child = world.spawn(&["sandbox", "cp", &there("/tmp/big"), &text(&big)]);
    until("the copy has begun", || entries() > before);
    signal(&child, Signal::SIGTERM);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(143));
    assert!(entries() == before && !big.exists());

    let missing = world
        .run(&["sandbox", "cp", &there("/nowhere"), "."])
        .expect(1);
    assert!(missing.stderr.contains("/nowhere"), "{}", missing.stderr);
    world.run(&["sandbox", "cp", "a", "b"]).expect(2);
    world
        .run(&["sandbox", "cp", "/no/such/file", &there("/tmp")])
        .expect(1);
}

pub(crate) fn kvm_exec_ends_its_command_with_a_signal_and_leaves_the_sandbox() {
    let world = World::open();
    let id = world.sandbox();
    let child = world.spawn(&["sandbox", "exec", &id, "--", "sleep", "12345"]);
    let runs = || {
        let script = "cat /proc/[0-9]*/comm | grep -cx sleep; true";
        let count = world.run(&["sandbox", "exec", &id, "--", "sh", "-c", script]);
        count.line() != "0"
    };
    until("the command runs", runs);
    signal(&child, Signal::SIGINT);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    until("the command has ended", || !runs());
    assert_eq!(world.ids(), [id]);
}

pub(crate) fn kvm_a_file_of_this_host_that_cannot_be_written_is_named() {
    let world = World::open();
    let id = world.sandbox();
    let make = [
        "sandbox",
        "exec",
        &id,
        "--",
        "sh",
        "-c",
        "head -c 300000 /dev/zero > /tmp/x",
    ];
    world.run(&make).expect(0);
    let from = format!("{id}:/tmp/x");
    let full = world.run(&["sandbox", "cp", &from, "/dev/full"]).expect(1);
    assert!(
        full.stderr
            .starts_with("cube: cannot write /dev/full: No space left"),
        "{}",
        full.stderr
    );
    assert!(full.stderr.contains("free some space"), "{}", full.stderr);
    // A file size limit simulates a full disk. No part of the file remains.
    let dir = world.dir.path().join("limited");
    std::fs::create_dir_all(&dir).unwrap();
    let to = dir.join("copy").to_str().unwrap().to_owned();
    let script = "trap '' XFSZ; ulimit -f 64; exec \"$@\"";
    let cube = env!("CARGO_BIN_EXE_cube");
    let words = ["-c", script, "bash", cube, "sandbox", "cp", &from, &to];
    let limited = world.program("bash", &words).output().unwrap();
    let limited = Ran::of(&words, limited).expect(1);
    assert!(
        limited
            .stderr
            .contains(&format!("cannot write {to}: File too large")),
        "{}",
        limited.stderr
    );
    assert_eq!(dir.read_dir().unwrap().count(), 0);
    // The sandbox is not at fault and continues.
    world.run(&["sandbox", "cp", &from, &to]).expect(0);
}
