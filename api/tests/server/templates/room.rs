//! Templates whose disk is larger than their origin's.

use serde_json::{Value, json};

use super::{Build, request, run, start};
use crate::process::Server;

/// Prints how much disk space is free, in MiB.
const FREE: &str = "echo $(($(stat -f -c '%a * %S' /) >> 20))";

/// The disk size in responses, and the free space in a sandbox, in MiB.
fn sizes(server: &Server, name: &str, template: &str) -> (u64, u64) {
    let sandbox = server.create(&json!({"templateID": name}));
    let of = |answer: &Value| answer["diskSizeMB"].as_u64().unwrap();
    let detail = server.get(&sandbox.path("")).expect(200).json();
    let builds = server.get(&format!("/templates/{template}"));
    let builds = builds.expect(200).json();
    assert_eq!(of(&detail), of(&builds["builds"][0]), "{builds}");
    let free = server.sh(&sandbox, FREE).trim().parse().unwrap();
    let script = "cat /home/user/text; fallocate -l 1G /home/user/big && rm /home/user/big";
    assert_eq!(server.sh(&sandbox, script), "text\n");
    server.delete(&sandbox.path("")).expect(204);
    (of(&detail), free)
}

pub(crate) fn kvm_a_template_has_the_free_disk_that_its_build_asks_for() {
    let server = Server::open();
    let ask = |free_mb: u64| json!({"name": "large", "memoryMB": 256, "minFreeDiskMb": free_mb});
    let refused = server.post("/v3/templates", &ask(65537)).expect(400).json();
    let message = refused["message"].as_str().unwrap();
    assert!(
        message.starts_with("minFreeDiskMb is 65537: use 0 to 65536"),
        "{message}"
    );
    let answer = server.post("/v3/templates", &ask(6000)).expect(202).json();
    let large = Build::of(&server, &answer);
    // More than the disk of `base` has.
    let fills = "echo text > /home/user/text; fallocate -l 5G big && rm big";
    let large = large.start(&json!({"steps": [run(fills)]}));
    large.is_ready();
    let (size, free) = sizes(&server, "large", &large.template);
    assert!(size > 4096 + 6000 && free >= 6000, "{size} {free}");

    // A template built from it has its disk. A build with the same steps that requests nothing has the disk of `base`.
    let child = start(&server, "child", &json!({"fromTemplate": "large"}));
    child.is_ready();
    let (of_child, free) = sizes(&server, "child", &child.template);
    assert!(of_child == size && free >= 6000, "{of_child} {free}");
    let small = request(&server, "small", 256);
    let small = small.start(&json!({"steps": [run("echo text > /home/user/text")]}));
    small.is_ready();
    let (size, free) = sizes(&server, "small", &small.template);
    assert!(size == 4096 && free < 4096, "{size} {free}");
}

pub(crate) fn kvm_a_template_is_not_promised_more_disk_than_its_sandboxes_may_write() {
    let options = ["--insecure-loopback", "--warm", "0:0"];
    let server = Server::with(&[options.as_slice(), &["--disk-limit", "1GiB"]].concat());
    let ask = |free_mb: u64| json!({"name": "large", "memoryMB": 256, "minFreeDiskMb": free_mb});
    let refused = server.post("/v3/templates", &ask(1025)).expect(400).json();
    let message = refused["message"].as_str().unwrap();
    for part in ["minFreeDiskMb is 1025", "1024 MiB", "sandbox.disk"] {
        assert!(message.contains(part), "{message}");
    }
    server.post("/v3/templates", &ask(1024)).expect(202);
}
