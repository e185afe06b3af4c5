//! Templates of images and Dockerfiles. The image is built into the server, so no registry is needed.

use std::{fs, time::Instant};

use testbed::server::{Door, Tls};

use crate::{
    registry::{PAGE, PORT, serve},
    world::{Ran, World, variable},
};

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
    // The defaults of an image whose config sets none.
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
    // Two concurrent runs do not end each other's build.
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
    let is_of_image = |item: &&serde_json::Value| {
        let name = item["names"][0].as_str();
        name.is_some_and(|name| name.starts_with("image/"))
    };
    let of_images = templates.iter().filter(is_of_image).count();
    assert_eq!(of_images, 2, "{templates:?}");
    world.is_empty_soon();
}

pub(crate) fn kvm_a_dockerfile_becomes_a_template() {
    let world = World::open();
    let dir = world.dir.path().join("context");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("greet.txt"), "hello").unwrap();
    let text = format!(
        "FROM {IMAGE}\nARG NAME=all DIR=/s\nENV WHO=world COST='$5' P=/x:$PATH\nWORKDIR ${{DIR}}rv\nCOPY greet.txt .\n\
         RUN echo \"$(cat greet.txt) $WHO\" > $NAME\\\n.txt\n"
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
        "cat all.txt; echo $WHO $COST ${NAME-none}; test $P = /x:$PATH && pwd",
    ]);
    let shown = ran.expect(0).stdout;
    assert_eq!(shown, "hello world\nworld $5 none\n/srv\n");
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

pub(crate) fn kvm_a_dockerfile_has_its_build_arguments_and_ignored_files() {
    let world = World::open();
    let dir = world.dir.path().join("arguments");
    fs::create_dir_all(&dir).unwrap();
    for (name, text) in [
        ("a", "a"),
        ("b", "b"),
        (".dockerignore", "a"),
        ("app.Dockerfile.dockerignore", "b\n*ocker*"),
        (
            "app.Dockerfile",
            "ARG IMAGE=none\nFROM $IMAGE\nRUN echo \"${V-unset}\" > /found\nARG V=1 W=2\n\
             RUN echo \"$V $W $https_proxy\" >> /found\nCOPY . /copied\n",
        ),
    ] {
        fs::write(dir.join(name), text).unwrap();
    }
    let file = dir.join("app.Dockerfile").to_str().unwrap().to_owned();
    let image = format!("IMAGE={IMAGE}");
    let mut build = vec!["template", "build", "args", "-f", &file, "--memory", "256"];
    for given in [&image, "V", "https_proxy=http://p:1/$x", "OTHER=1"] {
        build.extend(["--build-arg", given]);
    }
    let built = world.cube(&build).env("V", "here").output().unwrap();
    let built = Ran::of(&build, built).expect(0);
    let warning = "[OTHER] were not consumed";
    assert!(built.stderr.contains(warning), "{}", built.stderr);
    let words = [
        "run",
        "--template",
        "args",
        "--",
        "sh",
        "-c",
        "cat /found; ls -A /copied",
    ];
    let found = world.run(&words).expect(0).stdout;
    assert_eq!(found, "unset\nhere 2 http://p:1/$x\na\n");
    let words = [
        "template",
        "build",
        "x",
        "--image",
        IMAGE,
        "--build-arg",
        "A=1",
    ];
    world.run(&words).expect(2);
}

pub(crate) fn kvm_the_config_of_an_image_is_that_of_its_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let busybox = variable("CUBE_ARTIFACTS").unwrap().join("guest/busybox");
    let registry = serve(dir.path(), &busybox);
    let mirror = format!("{registry}=http://{registry}");
    let options = [
        "--image-mirror",
        &mirror,
        "--image-exception",
        "127.0.0.0/8",
    ];
    let options = options.map(str::to_owned);
    let world = World::with_options(Door::Open, Tls::Off, &options);
    let image = format!("{registry}/r:latest");
    let port = PORT.to_string();
    let create = [
        "cubemastercli",
        "tpl",
        "create-from-image",
        "--image",
        &image,
        "--writable-layer-size",
        "1G",
        "--probe",
        &port,
        "--probe-path",
        "/page",
        "--memory",
        "256",
        "--alias",
        "web",
        "--env",
        "MORE=a$b",
    ];
    let created = world.run(&create).expect(0).stdout;
    let job = created
        .lines()
        .next()
        .unwrap()
        .rsplit(' ')
        .next()
        .unwrap()
        .to_owned();
    let watched = world
        .run(&["cubemastercli", "tpl", "watch", "--job-id", &job])
        .expect(0)
        .stdout;
    assert!(
        watched.contains("pull_layers: 1/1") || watched.contains("status: READY"),
        "{watched}"
    );
    // The entry point runs in every sandbox, and commands have the image's user, directory and variables.
    let script = format!(
        "id -un; pwd; echo \"$GREETING,$MORE,$PATH\"; busybox wget -qO- http://127.0.0.1:{port}/page"
    );
    let ran = world.run(&["run", "--template", "web", "--", "/bin/sh", "-c", &script]);
    assert_eq!(
        ran.expect(0).stdout,
        format!("web\n/srv/www\nit's $HOME,a$b,/opt/own:/bin\n{PAGE}")
    );
    // Without the start command.
    let script = format!("id -un; pwd; busybox wget -qO- http://127.0.0.1:{port}/page");
    let ran = world.run(&[
        "run", "--image", &image, "--memory", "256", "--", "/bin/sh", "-c", &script,
    ]);
    let ran = ran.expect(1);
    assert_eq!(ran.stdout, "web\n/srv/www\n");
    assert!(
        ran.stderr.contains("1 layers") || ran.stderr.contains("CACHED"),
        "{}",
        ran.stderr
    );
}
