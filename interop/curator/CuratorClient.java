// A client of Curator's lock recipes: takes one command per line and gives one answer per line.
//
//   lock RECIPE PATH   locked, or busy: it does not wait. RECIPE is mutex, read or write.
//   wait RECIPE PATH   waiting: it waits in line
//   state              waiting, held, or nothing
//   unlock             unlocked, or the name of what was thrown
//
// Run with: java -cp JARS CuratorClient.java HOST:PORT

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessLock;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.framework.recipes.locks.InterProcessReadWriteLock;
import org.apache.curator.retry.RetryForever;

public class CuratorClient {
    private static volatile String state = "nothing";

    public static void main(String[] arguments) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], 20000, 5000, new RetryForever(100));
        client.start();
        // A lock belongs to the thread that acquired it.
        ExecutorService thread = Executors.newSingleThreadExecutor();
        InterProcessLock[] lock = new InterProcessLock[1];
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split(" ");
            switch (words[0]) {
                case "lock":
                    lock[0] = recipe(client, words[1], words[2]);
                    System.out.println(thread.submit(() -> lock[0].acquire(0, TimeUnit.SECONDS)).get() ? "locked" : "busy");
                    break;
                case "wait":
                    lock[0] = recipe(client, words[1], words[2]);
                    state = "waiting";
                    thread.submit(() -> {
                        lock[0].acquire();
                        state = "held";
                        return null;
                    });
                    System.out.println("waiting");
                    break;
                case "state":
                    System.out.println(state);
                    break;
                default:
                    System.out.println(thread.submit(() -> {
                        try {
                            lock[0].release();
                            state = "nothing";
                            return "unlocked";
                        } catch (Exception thrown) {
                            return thrown.getClass().getSimpleName();
                        }
                    }).get());
            }
            System.out.flush();
        }
        System.exit(0);
    }

    private static InterProcessLock recipe(CuratorFramework client, String recipe, String path) {
        switch (recipe) {
            case "read":
                return new InterProcessReadWriteLock(client, path).readLock();
            case "write":
                return new InterProcessReadWriteLock(client, path).writeLock();
            default:
                return new InterProcessMutex(client, path);
        }
    }
}
