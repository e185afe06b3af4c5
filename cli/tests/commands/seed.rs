//! The command line of CubeSandbox's guides.

use crate::world::World;

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

    // The same flags again: the same template, and at once.
    let again = world.run(&create).expect(0).stdout;
    assert!(
        again.contains(&template) && again.contains("READY"),
        "{again}"
    );

    // The command ran before the snapshot, and goes on in sandboxes.
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
