// The points of one curve, at ever greater places, few enough for a run of days.

const MOST = 2000;
const BINS = 500;

/** A curve that grows.  Of more than 2,000 points the least and the greatest of each part are kept. */
export class Line {
  constructor(x = [], y = []) {
    this.x = x;
    this.y = y;
  }

  get size() {
    return this.x.length;
  }

  /** Put in a point; what stands at its place already is replaced. */
  put(x, y) {
    let at = this.x.length;
    while (at && this.x[at - 1] > x) at--;
    if (at && this.x[at - 1] === x) {
      this.y[at - 1] = y;
      return;
    }
    this.x.splice(at, 0, x);
    this.y.splice(at, 0, y);
    if (this.x.length > MOST) this.fold();
  }

  /** The points as pairs. */
  pairs() {
    return this.x.map((x, n) => [x, this.y[n]]);
  }

  /** Keep the least and the greatest of each of 500 parts of equal width, and the last point. */
  fold() {
    const [first, last] = [this.x[0], this.x.at(-1)], width = (last - first) / BINS || 1;
    const kept = new Set([0, this.x.length - 1]);
    for (let begin = 0, end = 0; begin < this.x.length; begin = end) {
      const bin = Math.floor((this.x[begin] - first) / width);
      let least = begin, greatest = begin;
      for (end = begin; end < this.x.length && Math.floor((this.x[end] - first) / width) === bin; end++) {
        if (this.y[end] < this.y[least]) least = end;
        if (this.y[end] > this.y[greatest]) greatest = end;
      }
      kept.add(least).add(greatest);
    }
    const places = [...kept].sort((a, b) => a - b);
    [this.x, this.y] = [places.map(n => this.x[n]), places.map(n => this.y[n])];
  }
}
