use oci_image::registry::Credentials;
use rest::{BuildStep, ImageRegistry, StartBuild};

use super::*;

fn again(build: &Requested, tag: &str) -> RedoSpec {
    RedoSpec {
        template_id: build.template_id.clone(),
        tag: tag.to_owned(),
        skip_cache: false,
        credentials: None,
        owner: None,
    }
}

fn credentials() -> Option<Credentials> {
    Some(Credentials {
        username: "u".to_owned(),
        password: "p".to_owned(),
    })
}

fn set(tags: &[&str]) -> BTreeSet<String> {
    tags.iter().map(|tag| (*tag).to_owned()).collect()
}

impl World {
    /// Builds `n` from a private image, with one COPY step.
    async fn private(&self) -> Requested {
        let build = self.request("n").await;
        let copy = BuildStep {
            kind: "COPY".to_owned(),
            args: Some(vec!["a".to_owned(), "b".to_owned()]),
            files_hash: Some("0a".repeat(32)),
            force: Some(true),
        };
        let request = StartBuild {
            steps: Some(vec![copy]),
            start_cmd: Some("serve".to_owned()),
            from_image_registry: Some(ImageRegistry::Registry {
                username: "u".to_owned(),
                password: "p".to_owned(),
            }),
            ..StartBuild::default()
        };
        self.start_with(&build, request).await.unwrap();
        self.pool.succeed(&build.template_id, "p1");
        self.ended(&build).await;
        build
    }
}

#[tokio::test]
async fn a_redo_has_the_order_of_its_build_and_takes_over_its_names() {
    let mut world = World::new();
    let first = world.private().await;
    let id = first.template_id.clone();
    let assigned = world
        .builds
        .assign(id.clone(), "default".into(), set(&["v1"]));
    assigned.await.unwrap();
    // A refused start does not change the order.
    assert!(matches!(
        world.start(&first).await,
        Err(BuildsError::NotWaiting)
    ));
    world.restart().await;
    let refused = world.builds.redo(again(&first, "v1")).await;
    assert!(matches!(refused, Err(BuildsError::NoCredentials(image)) if image == "debian"));
    let spec = RedoSpec {
        credentials: credentials(),
        ..again(&first, "v1")
    };
    let second = world.builds.redo(spec).await.unwrap();
    assert_eq!(second.template_id, id);
    assert_eq!(
        world.state(&second),
        Some(BuildState::Started),
        "visible at once"
    );
    assert_eq!(world.pool.names("p1").unwrap(), ["n", "n:v1"]);
    world
        .until("it begins", |w| w.pool.with_quiet(|s| s.orders.len() == 2))
        .await;
    let orders = world.pool.with_quiet(|s| s.orders.clone());
    let [before, after] = &orders[..] else {
        panic!("{orders:?}");
    };
    assert_eq!(
        (&after.from, &after.start, after.memory, &after.registry),
        (&before.from, &before.start, before.memory, &before.registry)
    );
    assert_eq!(after.steps[0].files, before.steps[0].files);
    assert!(!after.force && !after.steps[0].force && before.steps[0].force);
    world.pool.succeed(&id, "p2");
    assert!(matches!(
        world.ended(&second).await,
        BuildState::Ready { .. }
    ));
    assert_eq!(world.pool.names("p2").unwrap(), ["n", "n:v1"]);
    assert_eq!(world.pool.names("p1"), None);
}

#[tokio::test]
async fn a_redo_that_is_overtaken_keeps_no_template() {
    let world = World::new();
    let first = world.built("n", "p1").await;
    let id = first.template_id.clone();
    let second = world.builds.redo(again(&first, "default")).await.unwrap();
    let busy = world.builds.redo(again(&first, "default")).await;
    assert!(matches!(busy, Err(BuildsError::Busy(name)) if name == "n:default"));
    world
        .until("it begins", |w| w.pool.with_quiet(|s| s.begun.len() == 2))
        .await;
    // Its only tag is removed while it runs.
    world
        .builds
        .assign(id.clone(), "default".into(), set(&["v1"]))
        .await
        .unwrap();
    world
        .builds
        .unassign(id.clone(), set(&["default"]))
        .await
        .unwrap();
    world.pool.succeed(&id, "p2");
    assert_eq!(
        world.ended(&second).await,
        BuildState::Ready { template: None }
    );
    world
        .until("its template is removed", |w| w.pool.names("p2").is_none())
        .await;
    assert_eq!(world.pool.names("p1").unwrap(), ["n:v1"]);
}

#[tokio::test]
async fn a_redo_that_cannot_be_done_names_the_reason() {
    let world = World::new();
    let first = world.private().await;
    let id = &first.template_id;
    let redo = |spec| world.builds.redo(spec);
    let unknown = RedoSpec {
        template_id: "other".to_owned(),
        ..again(&first, "default")
    };
    assert!(matches!(
        redo(unknown).await,
        Err(BuildsError::NoTemplate(_))
    ));
    let no_tag = redo(again(&first, "v9")).await;
    assert!(matches!(no_tag, Err(BuildsError::NotReady(name)) if name == "n:v9"));
    // The COPY's archive was never uploaded. With the cache, it may not be needed.
    let forced = RedoSpec {
        skip_cache: true,
        credentials: credentials(),
        ..again(&first, "default")
    };
    let no_files = redo(forced).await;
    assert!(matches!(no_files, Err(BuildsError::NoFiles(name, 1)) if name == "n"));
    let order = world
        .dir
        .path()
        .join(format!("builds/templates/{id}/{}.order", first.build_id));
    std::fs::write(&order, "{").unwrap();
    let damaged = redo(again(&first, "default")).await;
    assert!(matches!(damaged, Err(BuildsError::Store(_))));
    std::fs::remove_file(order).unwrap();
    let older = redo(again(&first, "default")).await;
    assert!(matches!(older, Err(BuildsError::NoOrder(name)) if name == "n"));
    assert_eq!(world.pool.names("p1").unwrap(), ["n"]);
    world.builds.stop().await;
    assert!(matches!(
        redo(again(&first, "default")).await,
        Err(BuildsError::Closed)
    ));
}
