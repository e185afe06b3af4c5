//! Images that become guests.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    archive::{dir, file, image, image_by, pack, stored},
    registry::with_password,
    world::{World, images, registries, run, serve, state},
};

pub(crate) fn kvm_a_guest_of_a_pulled_image_runs_commands() {
    run(async {
        let (state, storage) = (state(), tempfile::tempdir().unwrap());
        let layers = [
            pack(&[dir("srv"), file("srv/a", "1")]),
            pack(&[file("srv/b", "2")]),
        ];
        let registry = with_password(storage.path(), &image(&layers));
        let reference = format!("{}/r:latest", registry.address);
        let world = World::open(state.path(), images(registries(&[registry.address]))).await;

        let first = world.ask_with(&reference, Some("secret")).await;
        let base = first.base();
        assert_eq!(base.defaults.env, [("A".to_owned(), "b".to_owned())]);
        let begin = format!("[base] FROM {reference} [{}]", base.key);
        assert_eq!(first.log[0], begin);
        assert_eq!(first.count("Pulled layer sha256:"), 2, "{:?}", first.log);
        assert_eq!(first.log.last().unwrap(), "Layers extracted");
        let script = "cat /srv/a /srv/b; id -un user; echo kept > /srv/c && cat /srv/c";
        assert_eq!(world.sh(&base.template, script).await, "12user\nkept");

        let again = world.ask_with(&reference, Some("secret")).await;
        assert_eq!(again.base().template, base.template);
        assert_eq!(again.base().defaults, base.defaults);
        assert_eq!(again.log, [format!("CACHED {begin}")]);
        // Access to a known image is still up to the registry.
        for password in [None, Some("wrong")] {
            let refused = world.ask_with(&reference, password).await;
            assert!(
                refused.reason().contains("denies access"),
                "{}",
                refused.reason()
            );
            assert!(!refused.reason().contains("wrong"));
        }
        world.close().await;
    });
}

pub(crate) fn kvm_an_image_is_summed_and_converted_in_the_control_group_of_the_background() {
    run(async {
        let state = state();
        let mut noise = vec![0; 32 << 20];
        let mut random = fs::File::open("/dev/urandom").unwrap();
        random.read_exact(&mut noise).unwrap();
        let layers = [pack(&[file("srv/noise", noise)])];
        let (_server, address) = serve(&image_by(&layers, stored)).await;
        let spec = images(registries(&[address.parse().unwrap()]));
        let world = World::open(state.path(), spec).await;
        let procs = world.pool.background().unwrap().to_owned();
        let group = procs.parent().unwrap().to_owned();
        let read = |file: &str| fs::read_to_string(group.join(file)).ok();
        let weight = read("cpu.shares").or_else(|| read("cpu.weight"));
        assert!(matches!(weight.as_deref(), Some("102\n" | "10\n")));
        let has_ended = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&has_ended);
        let watch = std::thread::spawn(move || {
            let mut seen = BTreeSet::new();
            while !ended.load(Ordering::Relaxed) {
                let pids = fs::read_to_string(&procs).unwrap();
                seen.extend(pids.lines().map(str::to_owned));
            }
            seen
        });
        world.ask(&format!("{address}/r")).await.base();
        has_ended.store(true, Ordering::Relaxed);
        let seen = watch.join().unwrap();
        assert_eq!(seen.len(), 2, "one sums the layer, one converts: {seen:?}");
        world.close().await;
        assert!(!group.exists());
    });
}

pub(crate) fn kvm_a_known_image_needs_its_manifest_only() {
    run(async {
        let state = state();
        let (server, address) = serve(&image(&[pack(&[file("a", "1")])])).await;
        let reference = format!("{address}/r");
        let spec = images(registries(&[address.parse().unwrap()]));
        let world = World::open(state.path(), spec.clone()).await;
        let first = world.ask(&reference).await;
        let asked_for = server.paths().len();
        assert_eq!(
            asked_for,
            3,
            "manifest, config, layer: {:?}",
            server.paths()
        );
        let template = first.base().template.clone();

        let manifests = |paths: &[String]| paths.iter().all(|path| path.contains("/manifests/"));
        assert_eq!(world.ask(&reference).await.base().template, template);
        // A later server finds it too, and so does one whose pool has lost the template.
        world.close().await;
        let world = World::open(state.path(), spec).await;
        assert_eq!(world.ask(&reference).await.base().template, template);
        world.pool.remove_template(&template).await.unwrap();
        let other = world.ask(&reference).await;
        assert_ne!(other.base().template, template);
        assert_eq!(other.base().key, first.base().key);
        assert_eq!(other.count("CACHED layer"), 1, "{:?}", other.log);
        assert_eq!(world.sh(&other.base().template, "cat /a").await, "1");
        let later = &server.paths()[asked_for..];
        assert!(manifests(later), "{later:?}");
        world.close().await;
    });
}

pub(crate) fn kvm_the_default_image_needs_no_registry() {
    run(async {
        let state = state();
        let world = World::open(state.path(), images(registries(&[]))).await;
        let (first, second) = tokio::join!(world.ask("e2bdev/base"), world.ask("e2bdev/base"));
        let template = &first.base().template;
        assert_eq!(second.base().template, *template, "one disk for both");
        assert_eq!(
            world
                .sh(template, "test -x /usr/bin/python3 && echo yes")
                .await,
            "yes"
        );
        assert_eq!(
            world
                .ask("docker.io/e2bdev/base:latest")
                .await
                .base()
                .template,
            *template
        );
        // An image that is not installed is pulled; here, from a server that refuses connections.
        let mut nowhere = registries(&[]);
        let endpoint = "http://127.0.0.1:1".parse().unwrap();
        nowhere
            .endpoints
            .insert("docker.io".to_owned(), vec![endpoint]);
        world.close().await;
        let world = World::open(state.path(), images(nowhere)).await;
        let other = world.ask("e2bdev/code-interpreter").await;
        assert!(
            other
                .reason()
                .contains("'code-interpreter-v1', which is not installed")
        );
        world.close().await;
    });
}
