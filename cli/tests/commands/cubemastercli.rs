//! The command line of CubeSandbox's guides.

use std::fs;

use serde_json::Value;

use crate::world::{World, bare};

pub(crate) fn kvm_the_commands_of_the_guides_work() {
    let world = World::open();
    let start = "cd /tmp && exec python3 -m http.server 49999";
    let create = [
        "cubemastercli",
        "tpl",
        "create-from-image",
        "--image",
        "e2bdev/base",
        "--writable-layer-size",
        "1G",
        "--expose-port",
        "49999",
        "--expose-port",
        "49983",
        "--probe",
        "49999",
        "--memory",
        "512",
        "--cmd",
        "bash",
        "--arg",
        "-c",
        "--arg",
        start,
    ];
    let created = world.run(&create).expect(0).stdout;
    let lines: Vec<_> = created
        .lines()
        .map(|line| line.split(':').next().unwrap())
        .collect();
    assert_eq!(
        lines,
        [
            "job_id",
            "template_id",
            "attempt_no",
            "artifact_id",
            "status",
            "phase",
            "progress"
        ]
    );
    let value = |name: &str| {
        let line = created.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let (job, template) = (value("job_id"), value("template_id"));
    let watched = world
        .run(&["cubemastercli", "tpl", "watch", "--job-id", &job])
        .expect(0)
        .stdout;
    assert!(
        watched.contains("distribution: 1/1 ready, 0 failed"),
        "{watched}"
    );
    assert!(watched.ends_with("template_status: READY\n"), "{watched}");

    // The same flags again: the same template, without a wait.
    let again = world.run(&create).expect(0).stdout;
    assert!(
        again.contains(&template) && again.contains("READY"),
        "{again}"
    );

    // The command ran before the snapshot, and continues in sandboxes.
    let script = "exec 3<>/dev/tcp/127.0.0.1/49999 && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && head -1 <&3";
    let answer = world.run(&["run", "--template", &template, "--", "bash", "-c", script]);
    assert!(answer.expect(0).stdout.contains("200 OK"));

    let list = world
        .run(&["cubemastercli", "tpl", "list", "-o", "wide"])
        .expect(0)
        .stdout;
    assert!(
        list.starts_with("TEMPLATE_ID") && list.contains(&template),
        "{list}"
    );
    world
        .run(&["cubemastercli", "tpl", "info", &template])
        .expect(0);
    world
        .run(&["cubemastercli", "tpl", "status", &job])
        .expect(0);

    let sandbox = world
        .run(&["sandbox", "create", "--template", &template])
        .line();
    let listed = world
        .run(&["cubemastercli", "sandbox", "list"])
        .expect(0)
        .stdout;
    assert!(
        listed.contains(&sandbox) && listed.contains("RUNNING"),
        "{listed}"
    );
    let killed = world.run(&["cubemastercli", "sandbox", "kill", "--sandbox-id", &sandbox]);
    assert_eq!(killed.line(), format!("sandbox killed: {sandbox}"));
    let unknown = world.run(&["cubemastercli", "sandbox", "kill", "--sandbox-id", &sandbox]);
    assert!(unknown.expect(1).stderr.starts_with("error: "));
    let deleted = world.run(&["cubemastercli", "tpl", "delete", &template]);
    assert_eq!(deleted.line(), format!("template deleted: {template}"));
}

/// The response of a command with `--json`.
#[track_caller]
fn json(world: &World, words: &[&str]) -> Value {
    let answer = world.run(words).expect(0).stdout;
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["ret"]["ret_code"], 200, "{answer}");
    answer
}

fn ids(list: &Value) -> Vec<&str> {
    let all = list["data"].as_array().unwrap().iter();
    all.map(|one| one["template_id"].as_str().unwrap())
        .collect()
}

pub(crate) fn kvm_answers_have_the_shape_of_the_guides_and_chosen_ids_are_kept() {
    const TPL: [&str; 2] = ["cubemastercli", "tpl"];
    let tpl = |words: &[&'static str]| [&TPL, words].concat();
    let world = World::open();
    let created = tpl(&[
        "create-from-image",
        "--image",
        "e2bdev/base",
        "--writable-layer-size",
        "1G",
        "--template-id",
        "tpl-mine",
        "--memory",
        "256",
        "--env",
        "A=b",
        // The agent's port, which the guides probe.
        "--probe",
        "49983",
        "--probe-path",
        "/health",
        "--json",
    ]);
    let created = json(&world, &created);
    assert_eq!(created["job"]["template_id"], "tpl-mine");
    let job = created["job"]["job_id"].as_str().unwrap();
    let words = [&TPL[..], &["watch", "--json", "--job-id", job]].concat();
    let watched = json(&world, &words);
    assert_eq!(
        (&watched["job"]["status"], &watched["job"]["template_id"]),
        (&"READY".into(), &"tpl-mine".into())
    );
    let list = json(&world, &tpl(&["list", "--json"]));
    assert!(ids(&list).contains(&"tpl-mine"), "{list}");

    let info = tpl(&["info", "--template-id", "tpl-mine", "--json"]);
    let plain = json(&world, &info);
    assert_eq!(plain["create_request"], Value::Null);
    assert_eq!(plain["replicas"][0]["status"], "READY");
    let info = json(&world, &[&info[..], &["--include-request"]].concat());
    let request = &info["create_request"];
    assert_eq!(request["source_image_ref"], "e2bdev/base");
    assert_eq!(request["container_overrides"]["resources"]["mem"], "256Mi");
    assert_eq!(request["build"]["steps"][0]["args"][1], "b");
    // An installed template has no order.
    let base = world.run(&tpl(&["info", "base", "--include-request"]));
    assert!(base.expect(0).stderr.contains("no create_request"));

    let sandbox = world
        .run(&["sandbox", "create", "--template", "tpl-mine"])
        .line();
    let words = ["commit", "--json", "--template-id", "kept", "--sandbox-id"];
    let words = [&TPL[..], &words, &[sandbox.as_str()]].concat();
    let kept = json(&world, &words);
    assert_eq!(kept["template_id"], "kept");
    let build = kept["build_id"].as_str().unwrap();
    let words = [&TPL[..], &["build-watch", "--build-id", build]].concat();
    let watched = world.run(&words).expect(0).stdout;
    assert!(watched.contains("template_id: kept\n") && watched.contains("READY"));
    let list = json(&world, &tpl(&["list", "--json"]));
    assert!(ids(&list).contains(&"kept"), "{list}");
    let listed = world.run(&["cubemastercli", "sandbox", "list"]).expect(0);
    assert!(listed.stdout.contains("tpl-mine"), "{}", listed.stdout);

    // All are ended, including those after one that does not exist.
    let words = ["cubemastercli", "cubebox", "destroy", "nope", &sandbox];
    let ended = world.run(&words).expect(1);
    assert!(ended.stderr.contains("nope") && ended.stdout.contains(&sandbox));
    let redone = world.run(&tpl(&["redo", "--template-id", "tpl-mine", "--wait"]));
    let redone = redone.expect(0).stdout;
    assert!(redone.ends_with("template_status: READY\n"), "{redone}");
    let usage = world.run(&tpl(&["delete"])).expect(2).stderr;
    assert!(usage.contains("Usage: cubemastercli tpl delete"), "{usage}");
}

pub(crate) fn kvm_a_request_is_rendered_without_a_server_and_a_template_with_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("req.json");
    let request = r#"{"annotations": {"cube.master.appsnapshot.template.id": "a"}, "labels": {"app": "demo"},
        "network_type": "tap"}"#;
    fs::write(&file, request).unwrap();
    let file = file.to_str().unwrap();
    let mut words = vec!["cubemastercli", "tpl", "render", "-f", file];
    let render = |words: &[&str]| {
        let mut cube = bare(words);
        let output = cube.env("E2B_API_URL", "http://127.0.0.1:1").output();
        let ran = crate::world::Ran::of(words, output.unwrap()).expect(0);
        assert!(
            ran.stderr.contains("network_type has no effect"),
            "{}",
            ran.stderr
        );
        serde_json::from_str::<Value>(&ran.stdout).unwrap()
    };
    let rendered = render(&words);
    assert_eq!(rendered["merged_request"]["templateID"], "a");
    assert_eq!(rendered["merged_request"]["metadata"]["app"], "demo");
    words.extend(["--template-id", "t", "--json"]);
    assert_eq!(render(&words)["merged_request"]["templateID"], "t");

    let world = World::open();
    let words = ["cubemastercli", "tpl", "render", "--template-id", "base"];
    let rendered = json(&world, &words);
    assert_eq!(rendered["merged_request"]["templateID"], "base");
    assert_eq!(rendered["template"]["names"][0], "base");
    world
        .run(&["cubemastercli", "tpl", "render", "nope"])
        .expect(1);
}
