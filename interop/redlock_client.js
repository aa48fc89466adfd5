// Node's redlock over ioredis. See src/foreign.rs for what it is asked.
'use strict'

const readline = require('node:readline')
const Redis = require('ioredis')
const Redlock = require('redlock')

const redlock = new Redlock([new Redis(Number(process.argv[2]))], { retryCount: 0 })
let held

async function answer(command, name, milliseconds) {
  switch (command) {
    case 'lock':
      try {
        held = await redlock.lock(name, Number(milliseconds))
        return 'locked'
      } catch (error) {
        if (error.name === 'LockError') return 'busy'
        throw error
      }
    case 'extend':
      return held.extend(60000).then(() => 'extended', () => 'lost')
    default:
      return held.unlock().then(() => 'unlocked', () => 'lost')
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    console.log(await answer(...line.split(' ')))
  }
  process.exit(0)
}

main()
