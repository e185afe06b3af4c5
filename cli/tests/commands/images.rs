//! Templates of images and Dockerfiles. The image is one that the server has itself, so no registry is needed.

use std::{fs, time::Instant};

use crate::world::{Ran, World};

const IMAGE: &str = "e2bdev/base";

pub(crate) fn kvm_an_image_is_built_once_and_keeps_its_user_and_directory() {
    let world = World::open();
    let words = [
        "run",
        "--image",
        IMAGE,
        "--memory",
        "256",
        "--",
        "sh",
        "-c",
        "id -un; pwd",
    ];
    let first = world.run(&words).expect(0);
    // Those of an image whose config names none.
    assert_eq!(first.stdout, "root\n/\n");
    assert!(
        first.stderr.contains("FROM e2bdev/base"),
        "{}",
        first.stderr
    );
    let started = Instant::now();
    let second = world.run(&words).expect(0);
    assert_eq!(
        (second.stdout.as_str(), second.stderr.as_str()),
        ("root\n/\n", "")
    );
    test_cases::found!("second run of the image: {:?}", started.elapsed());
    // Two at once do not end each other's build.
    let words = ["run", "--image", IMAGE, "--memory", "384", "--", "pwd"];
    let both = [world.spawn(&words), world.spawn(&words)];
    for run in both {
        assert_eq!(
            Ran::of(&words, run.wait_with_output().unwrap())
                .expect(0)
                .stdout,
            "/\n"
        );
    }
    let templates = world.run(&["template", "list", "--json"]).items("template");
    assert_eq!(templates.len(), 3, "{templates:?}");
    world.is_empty_soon();
}

pub(crate) fn kvm_a_dockerfile_becomes_a_template() {
    let world = World::open();
    let dir = world.dir.path().join("context");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("greet.txt"), "hello").unwrap();
    let text = format!(
        "FROM {IMAGE}\nENV WHO=world\nWORKDIR /srv\nCOPY greet.txt .\nRUN echo \"$(cat greet.txt) $WHO\" > all\n"
    );
    fs::write(dir.join("Dockerfile"), text).unwrap();
    let file = dir.join("Dockerfile").to_str().unwrap().to_owned();
    let build = [
        "template", "build", "mine:v1", "-f", &file, "--memory", "256",
    ];
    let built = world.run(&build).expect(0);
    assert!(built.stdout.ends_with("ready\n"), "{}", built.stdout);
    let ran = world.run(&[
        "run",
        "--template",
        "mine:v1",
        "--",
        "sh",
        "-c",
        "cat all; echo $WHO; pwd",
    ]);
    assert_eq!(ran.expect(0).stdout, "hello world\nworld\n/srv\n");
    let tagged = world
        .run(&["template", "tag", "mine:v1", "stable"])
        .expect(0);
    assert!(tagged.stdout.contains("stable"), "{}", tagged.stdout);
    let tags = world.run(&["template", "tags", "mine"]).expect(0).stdout;
    assert!(tags.contains("v1") && tags.contains("stable"), "{tags}");
    let logs = world.run(&["template", "logs", "mine"]).expect(0).stdout;
    assert!(logs.contains("COPY greet.txt"), "{logs}");
    let info = world.run(&["template", "info", "mine"]).expect(0).stdout;
    assert!(info.contains("mine:v1") && info.contains("ready"), "{info}");
    fs::write(
        dir.join("Dockerfile"),
        format!("FROM {IMAGE}\nRUN echo no >&2; exit 3\n"),
    )
    .unwrap();
    let failed = world
        .run(&["template", "build", "bad", "-f", &file])
        .expect(1);
    assert!(
        failed.stderr.contains("in step 1") && failed.stderr.contains("exit status 3"),
        "{}",
        failed.stderr
    );
    world.run(&["template", "delete", "mine"]).expect(0);
    world.run(&["template", "info", "mine"]).expect(1);
}
