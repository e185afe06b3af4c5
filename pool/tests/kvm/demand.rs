//! Warm slots and loaded templates by demand, within a budget.

use std::{fs, time::Duration};

use model::Bytes;
use pool::{
    CreateSpec, OnClose, PauseMode, Pool, PoolConfig, PoolError, PoolStats, Sandbox, StockStats,
    TemplateDefaults, WarmMarks,
};
use vmm_control::template::loaded_size;

use super::{
    lifecycle::run,
    support::{State, config, sh, spec, template_with, until, variable},
};

/// Installs copies of the template `base`, which share its files.
fn install(state: &State, names: &[String]) -> PoolConfig {
    let installed = state.0.join("copies");
    for name in names {
        let dir = installed.join(name);
        template_with(&dir, b"[]");
        // Without a recipe, the template is not examined for a rebuild.
        fs::remove_file(dir.join("recipe.json")).expect("a recipe");
    }
    PoolConfig {
        installed_templates: Some(installed),
        warm_slots: 4,
        ..config(&state.0, 0)
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("copy-{n}")).collect()
}

async fn open(config: PoolConfig) -> Pool {
    Pool::open(config).await.expect("a pool").0
}

async fn create(pool: &Pool, template: &str) -> Sandbox {
    let spec = CreateSpec {
        template: template.to_owned(),
        ..spec()
    };
    pool.create(spec).await.expect("a sandbox")
}

async fn use_once(pool: &Pool, template: &str) -> bool {
    let sandbox = create(pool, template).await;
    pool.kill(&sandbox.id).await.expect("a kill");
    sandbox.warm
}

fn stock(stats: &PoolStats, template: &str) -> StockStats {
    stats.stocks.get(template).copied().unwrap_or_default()
}

/// The metrics of a pool, which must be within its budget.
async fn stats(pool: &Pool) -> PoolStats {
    let stats = pool.stats().await;
    assert!(
        stats.warm + stats.filling <= stats.warm_limit && stats.warm_target <= stats.warm_limit,
        "{stats:?}"
    );
    assert!(stats.warm_bytes <= stats.warm_bytes_limit, "{stats:?}");
    stats
}

pub(crate) fn kvm_warm_slots_follow_demand_and_end_without_it() {
    run(async {
        let state = State::new();
        let config = PoolConfig {
            // Long enough for a fill on a busy host.
            idle: Duration::from_secs(8),
            ..install(&state, &names(2))
        };
        let pool = open(config).await;
        let used = create(&pool, "copy-0").await;
        assert!(!used.warm, "a first create does not wait for a stock");
        until("a slot is warm, and the template loaded", async || {
            let stock = stock(&stats(&pool).await, "copy-0");
            (stock.warm == 1 && stock.is_loaded).then_some(())
        })
        .await;
        let mapped = create(&pool, "copy-0").await;
        assert!(mapped.warm);
        let now = stats(&pool).await;
        assert_eq!(
            stock(&now, "copy-1"),
            StockStats::default(),
            "it is not used"
        );
        let counted = stock(&now, "copy-0");
        assert_eq!((counted.hits, counted.misses), (1, 1));
        until("nothing is kept without demand", async || {
            let stats = stats(&pool).await;
            let none = stats.warm + stats.warm_wanted + stats.templates_loaded == 0;
            (none && stats.filling == 0).then_some(())
        })
        .await;
        let memory = variable("CUBE_ARTIFACTS").join("templates/base");
        let loaded = loaded_size(&memory).expect("a template");
        assert_eq!(
            stats(&pool).await.warm_bytes,
            loaded,
            "a sandbox has the copy mapped"
        );
        sh(&mapped, "echo here").await;
        pool.kill(&mapped.id).await.expect("a kill");
        until("the copy is freed", async || {
            (stats(&pool).await.warm_bytes == 0).then_some(())
        })
        .await;
        // A sandbox of an unloaded template keeps running, and new ones start.
        sh(&used, "echo here").await;
        assert!(!use_once(&pool, "copy-0").await);
        until("it is loaded again", async || {
            let stock = stock(&stats(&pool).await, "copy-0");
            (stock.warm == 1 && stock.is_loaded).then_some(())
        })
        .await;
        assert!(use_once(&pool, "copy-0").await);
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_refused_creates_are_no_demand() {
    run(async {
        let state = State::new();
        let config = PoolConfig {
            max_sandboxes: 1,
            ..install(&state, &names(2))
        };
        let pool = open(config).await;
        let only = create(&pool, "copy-0").await;
        for _ in 0..5 {
            let spec = CreateSpec {
                template: "copy-0".to_owned(),
                ..spec()
            };
            let refused = pool.create(spec).await;
            assert!(
                matches!(refused, Err(PoolError::Full { .. })),
                "{refused:?}"
            );
        }
        pool.kill(&only.id).await.expect("a kill");
        create(&pool, "copy-1").await;
        let now = until("the last create has been counted", async || {
            let stats = stats(&pool).await;
            (stock(&stats, "copy-1").wanted > 0).then_some(stats)
        })
        .await;
        assert_eq!(now.refused, 5);
        assert_eq!(stock(&now, "copy-0").wanted, 1);
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_many_templates_share_one_budget() {
    run(async {
        const SLOTS: u32 = 3;
        let state = State::new();
        let all = names(10);
        let memory = variable("CUBE_ARTIFACTS").join("templates/base");
        let loaded = loaded_size(&memory).expect("a template");
        // Room for one loaded template.
        let memory = Bytes(loaded + loaded / 2 + u64::from(SLOTS) * (24 << 20));
        let config = PoolConfig {
            warm_slots: SLOTS,
            warm_memory: Some(memory),
            ..install(&state, &all)
        };
        let pool = open(config).await;
        for name in &all {
            assert!(!use_once(&pool, name).await);
            until("its slot is filled, or there is no room", async || {
                let stats = stats(&pool).await;
                let is_divided = stock(&stats, name).wanted > 0 && stats.warm_target > 0;
                (is_divided && stats.warm == stats.warm_target && stats.filling == 0).then_some(())
            })
            .await;
        }
        let now = until("the budget is divided again", async || {
            let stats = stats(&pool).await;
            (stats.warm_wanted >= 10).then_some(stats)
        })
        .await;
        assert_eq!((now.warm, now.warm_target), (SLOTS, SLOTS));
        assert_eq!(now.templates_loaded, 1);
        // A template that is used far more than the others takes the slot and the memory of one of them.
        let hot = "copy-9";
        until("the template that is used most has both", async || {
            use_once(&pool, hot).await;
            let stock = stock(&stats(&pool).await, hot);
            (stock.target > 0 && stock.is_loaded).then_some(())
        })
        .await;
        until("a warm slot of it", async || {
            (stock(&stats(&pool).await, hot).warm > 0).then_some(())
        })
        .await;
        assert!(use_once(&pool, hot).await);
        assert_eq!(stats(&pool).await.templates_loaded, 1);
        // All others work, from memory or from the disk.
        for name in &all {
            let sandbox = create(&pool, name).await;
            sh(&sandbox, "echo here").await;
        }
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_configured_marks_hold_within_the_budget() {
    run(async {
        let state = State::new();
        let one = WarmMarks { low: 1, high: 1 };
        let config = PoolConfig {
            warm: one,
            warm_slots: 2,
            ..install(&state, &names(3))
        };
        let filled = async |pool: &Pool, warm: u32| {
            until("the stock is full", async || {
                let stats = stats(pool).await;
                (stats.warm == warm && stats.filling == 0).then_some(stats)
            })
            .await
        };
        let pool = open(config.clone()).await;
        let stats = filled(&pool, 2).await;
        assert_eq!((stats.warm_wanted, stats.warm_target), (3, 2));
        pool.close(OnClose::Kill).await;
        let pool = open(PoolConfig {
            warm_slots: 3,
            ..config
        })
        .await;
        filled(&pool, 3).await;
        assert!(use_once(&pool, "copy-2").await);
        filled(&pool, 3).await;
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}

pub(crate) fn kvm_templates_have_a_quota_and_none_is_removed_for_another() {
    run(async {
        let state = State::new();
        let pool = open(config(&state.0, 0)).await;
        let sandbox = create(&pool, "base").await;
        let first = pool.snapshot(&sandbox.id, vec!["first".into()]).await;
        let taken = first.expect("a snapshot").bytes.0;
        pool.close(OnClose::Keep).await;
        let with_quota = async |quota: u64| {
            open(PoolConfig {
                template_quota: Some(Bytes(quota)),
                ..config(&state.0, 0)
            })
            .await
        };
        let pool = with_quota(taken + 1).await;
        let refused = pool.snapshot(&sandbox.id, Vec::new()).await;
        let why = refused.expect_err("a refusal").to_string();
        assert!(why.contains("pool.template_quota"), "{why}");
        let defaults = TemplateDefaults::default();
        let refused = pool.publish(&sandbox.id, Vec::new(), defaults).await;
        assert!(
            matches!(refused, Err(PoolError::TemplateQuota { .. })),
            "{refused:?}"
        );
        // Operations that take no further space are refused only if the quota is used up.
        let mode = PauseMode::Memory;
        pool.pause(&sandbox.id, mode).await.expect("a pause");
        let second = pool.snapshot(&sandbox.id, Vec::new()).await;
        let second = second.expect("a snapshot of a paused sandbox").id;
        let refused = pool.snapshot(&sandbox.id, Vec::new()).await;
        assert!(
            matches!(refused, Err(PoolError::TemplateQuota { .. })),
            "{refused:?}"
        );
        assert!(pool.template("first").await.is_some());
        pool.remove_template(&second).await.expect("a removal");
        let third = pool.snapshot(&sandbox.id, Vec::new()).await;
        third.expect("room again");
        pool.close(OnClose::Kill).await;
        state.assert_clean();
    });
}
