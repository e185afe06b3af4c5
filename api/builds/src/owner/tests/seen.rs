//! Order in which other nodes and clients see changes, and what a build waits for.

use super::*;

impl World {
    fn names(&self, reference: &str) -> Resolved {
        self.builds.catalog().resolve(reference)
    }

    fn announced(&self, id: &str, tag: &str) -> Option<String> {
        let all = self.pool.with_quiet(|s| s.announced.clone());
        all.get(id)?.as_ref()?.get(tag).cloned()
    }

    async fn start_from(&self, build: &Requested, template: &str) {
        let request = rest::StartBuild {
            from_template: Some(template.to_owned()),
            ..Default::default()
        };
        let spec = request::check_start(request).unwrap();
        self.builds.start(build.clone(), spec).await.unwrap();
    }
}

#[tokio::test]
async fn the_other_nodes_see_a_new_build_before_it_is_ready() {
    let mut world = World::new();
    let first = world.built("n", "p1").await;
    let id = first.template_id.clone();
    world.pool.with(|s| s.is_unseen = true);
    let second = world.request("n").await;
    world.start(&second).await.unwrap();
    world.pool.succeed(&id, "p2");
    world
        .until("it is announced", |w| {
            w.announced(&id, "default").as_ref() == Some(&second.build_id)
        })
        .await;
    // Creates still find the previous build, which still exists.
    assert_eq!(world.state(&second), Some(BuildState::Started));
    assert_eq!(world.names("n"), Resolved::Ready("p1".to_owned()));
    assert!(world.pool.names("p1").is_some());
    world.pool.with(|s| s.is_unseen = false);
    assert!(matches!(
        world.ended(&second).await,
        BuildState::Ready { .. }
    ));
    assert_eq!(world.names("n"), Resolved::Ready("p2".to_owned()));

    // A starting server announces its builds.
    world.pool.with(|s| s.announced.clear());
    world.restart().await;
    world
        .until("all is announced", |w| {
            w.announced(&id, "default").as_ref() == Some(&second.build_id)
        })
        .await;
    world.builds.remove(id.clone()).await.unwrap();
    let announced = world.pool.with_quiet(|s| s.announced.clone());
    assert_eq!(announced.get(&id), Some(&None));
    assert_eq!(world.names("n"), Resolved::Foreign);
}

#[tokio::test]
async fn the_other_nodes_see_a_tag_before_the_answer() {
    let world = World::new();
    let build = world.built("n", "p").await;
    let id = build.template_id.clone();
    let tags = BTreeSet::from(["v1".to_owned()]);
    world.pool.with(|s| s.is_unseen = true);
    let assign = |tags| world.builds.assign(id.clone(), "default".into(), tags);
    let assigned = assign(tags.clone());
    tokio::pin!(assigned);
    tokio::select! {
        _ = &mut assigned => panic!("it is answered too early"),
        () = world.until("it is announced", |w| w.announced(&id, "v1").is_some()) => {}
    }
    assert_eq!(world.names("n:v1"), Resolved::NotReady);
    world.pool.with(|s| s.is_unseen = false);
    assigned.await.unwrap();
    assert_eq!(world.names("n:v1"), Resolved::Ready("p".to_owned()));
    world.builds.unassign(id.clone(), tags).await.unwrap();
    assert_eq!(world.names("n:v1"), Resolved::NotReady);
    assert_eq!(world.announced(&id, "v1"), None);
}

#[tokio::test]
async fn a_build_waits_for_the_current_build_of_its_base() {
    let world = World::new();
    world.pool.with(|s| s.lacked.insert("base2".to_owned()));
    let build = world.request("n").await;
    world.start_from(&build, "base2").await;
    // It does not delay other builds.
    world.built("other", "o").await;
    assert_eq!(world.state(&build), Some(BuildState::Started));
    let begun = |w: &World| w.pool.with_quiet(|s| s.begun.contains(&build.template_id));
    assert!(!begun(&world));
    world.pool.with(|s| s.lacked.clear());
    // As when the copy arrives.
    world.request("other").await;
    world.until("it begins", begun).await;
    world.pool.succeed(&build.template_id, "p");
    world.ended(&build).await;

    world.pool.with(|s| s.lacked.insert("base2".to_owned()));
    let build = world.request("n").await;
    world.start_from(&build, "base2").await;
    let request_others = async {
        while world.state(&build) == Some(BuildState::Started) {
            world.request("other").await;
        }
    };
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, request_others).await.unwrap();
    let BuildState::Failed(reason) = world.ended(&build).await else {
        panic!("it has not failed");
    };
    assert!(reason.message.contains("'base2'"), "{reason:?}");
}
