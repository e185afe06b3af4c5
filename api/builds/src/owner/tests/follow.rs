use super::*;
use crate::record::TemplateRecord;

fn home(epoch: u64) -> Home {
    Home {
        node: "a".parse().unwrap(),
        epoch,
    }
}

fn record(builds: &Builds, id: &str) -> TemplateRecord {
    TemplateRecord::clone(&builds.catalog().templates[id])
}

impl World {
    async fn follow(&self, record: &TemplateRecord, made: Option<Made>) -> Result<(), BuildsError> {
        let copied = Copied {
            record: record.clone(),
            home: home(0),
            made,
        };
        self.builds.follow(copied).await
    }

    /// Copies a build, which becomes the template `q` of this pool.
    async fn copy(&self, of: &Self, build: &Requested) -> Result<(), BuildsError> {
        self.pool.add("q", TemplateKind::Built, &[]);
        let made = Made {
            build: build.build_id.clone(),
            template: "q".to_owned(),
            order: of.builds.order(build).await.unwrap(),
        };
        let record = record(&of.builds, &build.template_id);
        self.follow(&record, Some(made)).await
    }
}

#[tokio::test]
async fn a_copy_has_the_names_and_the_tags_of_its_home() {
    let (of, mut world) = (World::new(), World::new());
    let build = of.built("n", "p").await;
    let id = build.template_id.clone();
    let tags = BTreeSet::from(["v1".to_owned()]);
    let assigned = of
        .builds
        .assign(id.clone(), "default".to_owned(), tags.clone());
    assigned.await.unwrap();
    // A build without a tag is not copied.
    let later = of.request("n").await;
    world.copy(&of, &build).await.unwrap();
    let copy = record(&world.builds, &id);
    assert_eq!((copy.home.clone(), copy.builds.len()), (Some(home(0)), 1));
    assert!(world.state(&later).is_none());
    assert_eq!(world.pool.names("q").unwrap(), ["n", "n:v1"]);
    let order = world.builds.order(&build).await.unwrap();
    assert_eq!(order, of.builds.order(&build).await.unwrap());
    assert!(order.is_some());

    world.restart().await;
    of.builds.unassign(id.clone(), tags).await.unwrap();
    world.follow(&record(&of.builds, &id), None).await.unwrap();
    assert_eq!(world.pool.names("q").unwrap(), ["n"]);
    world.builds.take_over(id.clone(), home(1)).await.unwrap();
    world
        .until("it is taken over", |w| {
            record(&w.builds, &id).home == Some(home(1))
        })
        .await;

    // Nothing of it is left at its home.
    let empty = TemplateRecord {
        builds: Vec::new(),
        tags: BTreeMap::new(),
        ..record(&of.builds, &id)
    };
    world.follow(&empty, None).await.unwrap();
    assert!(world.builds.catalog().templates.is_empty());
    assert_eq!(world.pool.names("q"), None);
}

#[tokio::test]
async fn a_copy_does_not_take_a_name_and_a_former_home_gives_its_builds_up() {
    let (of, world) = (World::new(), World::new());
    let build = of.built("n", "p").await;
    let own = world.built("n", "o").await;
    let refused = world.copy(&of, &build).await.unwrap_err();
    assert!(matches!(refused, BuildsError::Taken(_)), "{refused}");
    assert_eq!(world.pool.names("o").unwrap(), ["n"]);
    assert_eq!(
        world.pool.names("q"),
        None,
        "the template that was made is removed"
    );
    world.pool.add("i", TemplateKind::Installed, &["m"]);
    let other = of.built("m", "p2").await;
    let refused = world.copy(&of, &other).await.unwrap_err();
    assert!(matches!(refused, BuildsError::Installed(_)), "{refused}");

    // The record after another node has taken the template over, while a build runs here.
    let taken = record(&world.builds, &own.template_id);
    let running = world.request("n").await;
    world.start(&running).await.unwrap();
    world
        .until("it runs", |w| w.pool.with_quiet(|s| s.begun.len() == 2))
        .await;
    world.follow(&taken, None).await.unwrap();
    assert_eq!(world.state(&running), None);
    let copy = record(&world.builds, &own.template_id);
    assert_eq!((copy.builds.len(), copy.home), (1, Some(home(0))));
}
