{{/* Labels of an object; those by which pods are found, of a component. */}}
{{- define "pods.labels" -}}
app.kubernetes.io/name: pods-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "pods.selector" -}}
app.kubernetes.io/name: pods-cluster
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pods.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "pods.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-runs" .Release.Name) }}
{{- end }}

{{/* What the containers of every pod share: the image, no privileges, variables. */}}
{{- define "pods.container" -}}
image: {{ include "pods.image" . }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "pods.ray" -}}
{{ include "pods.container" . }}
env:
  - {name: HF_HOME, value: /runs/.huggingface}
  - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ .Values.drainSeconds | quote }}}
{{- with .Values.secrets.environment }}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
volumeMounts:
  - {name: runs, mountPath: /runs}
  - {name: shm, mountPath: /dev/shm}
{{- end }}

{{/* What every pod has: its user, its volumes, where it may run. Called with a dict of root and pool. */}}
{{- define "pods.pod" -}}
securityContext:
  runAsUser: 1000
  runAsGroup: 1000
  runAsNonRoot: true
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .pool.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pool.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: runs, persistentVolumeClaim: {claimName: {{ include "pods.claim" .root }}}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.sharedMemory }}}}
{{- end }}

{{/* A worker group: with root, pool, its name and the resource that the actors of the pool ask for. */}}
{{- define "pods.group" -}}
{{- if or (lt (int .pool.replicas) (int .pool.minReplicas)) (gt (int .pool.replicas) (int .pool.maxReplicas)) }}
{{- fail (printf "%s.replicas (%d) must lie between minReplicas (%d) and maxReplicas (%d)" .name (int .pool.replicas) (int .pool.minReplicas) (int .pool.maxReplicas)) }}
{{- end -}}
groupName: {{ .name }}
replicas: {{ .pool.replicas }}
minReplicas: {{ .pool.minReplicas }}
maxReplicas: {{ .pool.maxReplicas }}
{{- with .pool.labels }}
labels: {{- toYaml . | nindent 2 }}
{{- end }}
rayStartParams:
  # What the actors of this pool ask for beside CPU and card: by it the two groups scale apart.
  resources: '"{\"{{ .resource }}\": {{ max 1 (int .pool.cards) }}}"'
template:
  metadata:
    labels:
      {{- include "pods.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .name }}
  spec:
    {{- include "pods.pod" . | nindent 4 }}
    terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
    containers:
      - name: ray-worker
        {{- include "pods.ray" .root | nindent 8 }}
        resources:
          {{- range list "requests" "limits" }}
          {{ . }}: {cpu: {{ $.pool.cpu | quote }}, memory: {{ $.pool.memory }}{{ if $.pool.cards }}, {{ $.pool.cardResource }}: {{ $.pool.cards | quote }}{{ end }}}
          {{- end }}
{{- end }}

{{/* The spec of a RayCluster. */}}
{{- define "pods.cluster" -}}
{{- if ge (int .Values.drainSeconds) (int .Values.terminationGracePeriodSeconds) }}
{{- fail (printf "drainSeconds (%d) must be less than terminationGracePeriodSeconds (%d): a pod is killed after that" (int .Values.drainSeconds) (int .Values.terminationGracePeriodSeconds)) }}
{{- end -}}
rayVersion: {{ .Values.rayVersion }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  upscalingMode: {{ .Values.autoscaler.upscalingMode }}
  idleTimeoutSeconds: {{ .Values.autoscaler.idleTimeoutSeconds }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {cpu: 500m, memory: 1Gi}
headGroupSpec:
  rayStartParams:
    num-cpus: "0" # nothing of the pools is placed beside the head
    dashboard-host: 0.0.0.0
  template:
    metadata:
      labels:
        {{- include "pods.selector" . | nindent 8 }}
        app.kubernetes.io/component: head
    spec:
      {{- include "pods.pod" (dict "root" . "pool" .Values.head) | nindent 6 }}
      containers:
        - name: ray-head
          {{- include "pods.ray" . | nindent 10 }}
          ports:
            - {name: gcs, containerPort: 6379}
            - {name: dashboard, containerPort: 8265}
            - {name: client, containerPort: 10001}
            - {name: metrics, containerPort: 8080}
          resources:
            requests: {cpu: {{ .Values.head.cpu | quote }}, memory: {{ .Values.head.memory }}}
            limits: {cpu: {{ .Values.head.cpu | quote }}, memory: {{ .Values.head.memory }}}
        {{- if .Values.dashboard.enabled }}
        # The page and /metrics of all runs on the volume.
        - name: pods-dashboard
          {{- include "pods.container" . | nindent 10 }}
          {{- if .Values.secrets.dashboardToken }}
          # The token goes into a file that nobody else can read, not onto the command line.
          args:
            - bash
            - -c
            - umask 077; printf %s "$PODS_DASHBOARD_TOKEN" > /tmp/token; unset PODS_DASHBOARD_TOKEN;
              exec pods dashboard /runs --host 0.0.0.0 --port 8765 --token-file /tmp/token
          env: [{name: PODS_DASHBOARD_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.secrets.dashboardToken }}, key: token}}}]
          {{- else }}
          args: [pods, dashboard, /runs, --host, 0.0.0.0, --port, "8765"]
          {{- end }}
          ports: [{name: pods, containerPort: 8765}]
          readinessProbe: {httpGet: {path: /healthz, port: pods}}
          livenessProbe: {httpGet: {path: /healthz, port: pods}, initialDelaySeconds: 30, periodSeconds: 30, failureThreshold: 5}
          resources:
            requests: {cpu: 200m, memory: 512Mi}
            limits: {cpu: "1", memory: 1Gi}
          volumeMounts: [{name: runs, mountPath: /runs}]
        {{- end }}
workerGroupSpecs:
  - {{- include "pods.group" (dict "root" . "pool" .Values.generators "name" "generators" "resource" "pods_generator") | nindent 4 }}
  - {{- include "pods.group" (dict "root" . "pool" .Values.learners "name" "learners" "resource" "pods_learner") | nindent 4 }}
{{- end }}
