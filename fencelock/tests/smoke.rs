//! Basics.
use std::time::Duration;
#[tokio::test(start_paused = true)]
async fn basics() {
    let locks = fencelock::connect("memory:").await.unwrap();
    let m = locks.mutex("a").ttl(Duration::from_secs(3));
    let g = m.acquire().await.unwrap();
    let t = tokio::spawn({
        let m = m.clone();
        async move { m.acquire().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(g.is_valid());
    let st = locks.status("a").await.unwrap();
    assert_eq!((st.holders.len(), st.waiters.len()), (1, 1));
    let old = g.token();
    drop(g);
    let g2 = t.await.unwrap();
    assert!(g2.token() > old);
    assert_eq!(locks.evict("a").await.unwrap(), 1);
    g2.lost().await;
    assert_eq!(g2.release().await.unwrap_err().kind(), fencelock::ErrorKind::Lost);
    let x = m.with(async |g| g.token().as_u64()).await.unwrap();
    assert!(x > 0);
    tokio::spawn({
        let m = m.clone();
        async move {
            m.with(async |g| {
                tokio::task::yield_now().await;
                g.token()
            })
            .await
        }
    })
    .await
    .unwrap()
    .unwrap();
    locks.close().await.unwrap();
}
